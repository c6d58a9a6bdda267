"""Policy: may this be done, by this person, now? Allow, deny, or ask people.

A policy is Cedar text. `policy_rules` reads it and finds every mistake, against the vocabulary that `policy_schema`
makes of the tools; `judge` answers with it; `policy_cases` tests it and `policy_replay` compares it with history.
"""

import hashlib
from collections.abc import Iterable

from interlock.governance.action import ToolFacts
from interlock.governance.decision import Answer, Asker, Circumstances, Decision, Outcome
from interlock.governance.judge import Policy
from interlock.governance.policy_cases import CaseResult, CasesInvalid, run_cases
from interlock.governance.policy_replay import Change, replay
from interlock.governance.policy_rules import PolicyInvalid, Reading, read_policy
from interlock.governance.policy_schema import cedar_schema

__all__ = [
    "DEFAULT_POLICY",
    "Answer",
    "Asker",
    "CaseResult",
    "CasesInvalid",
    "Change",
    "Circumstances",
    "Decision",
    "Outcome",
    "Policy",
    "PolicyInvalid",
    "cedar_schema",
    "compile_policy",
    "deny_everything",
    "load_policy",
    "replay",
    "run_cases",
]

# The policy of a tenant that has not written its own.
DEFAULT_POLICY = """\
// What may be done without asking, and what people decide. Change it and apply it: interlock policy apply FILE

// Looking at things is allowed.
@id("reads")
permit (principal, action in Action::"read", resource);

// So are changes that are easily undone.
@id("low-writes")
permit (principal, action in Action::"write", resource)
when { context.risk == "low" };

// Changes that take effort to undo: one person has to approve.
@id("medium-writes")
@decision("needs_approval") @tier("med")
@reason("this takes effort to undo, so one person has to approve it")
permit (principal, action in Action::"write", resource)
when { context.risk == "med" };

// Changes that are hard or impossible to undo: two people, and neither of them who asked.
@id("high-writes")
@decision("needs_approval") @tier("high") @two_person("true")
@reason("this is hard or impossible to undo, so two people have to approve it")
permit (principal, action in Action::"write", resource)
when { context.risk == "high" };
"""


def compile_policy(text: str, tools: Iterable[ToolFacts], *, file: str = "policy") -> Policy:
    """For publishing: PolicyInvalid with everything that is wrong."""
    reading = read_policy(text, tools, file)
    if faults := reading.faults():
        raise PolicyInvalid(faults)
    return Policy(reading, digest=digest_of_text(text))


def load_policy(text: str | None, tools: Iterable[ToolFacts]) -> Policy:
    """For a stored policy, which was right when it was published: never raises.

    Annotations that this version does not know ask for approval with tier high; rules about tools that this process
    does not have never apply. Anything else that is wrong denies everything.
    """
    if text is None:
        return deny_everything(
            "no policy is published, so nothing may be done; publish one: interlock policy apply FILE"
        )
    reading = read_policy(text, tools, "policy")
    if reading.broken or reading.policy_set is None:
        wrong = "; ".join(str(fault) for fault in reading.broken.sorted()[:3]) or "it has too many faults"
        why = f"the published policy is not valid any more, so nothing may be done until it is mended: {wrong}"
        return deny_everything(why, digest=digest_of_text(text))
    return Policy(reading, digest=digest_of_text(text))


def deny_everything(why: str, *, digest: str | None = None) -> Policy:
    return Policy(Reading("policy"), digest=digest, refusal=why)


def digest_of_text(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
