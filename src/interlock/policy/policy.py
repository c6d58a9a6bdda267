"""Policy: decides whether a person may do something now. The answers are allow, deny and needs_approval.

A policy is Cedar text. `policy_rules` reads it and finds every mistake, against the vocabulary that `policy_schema`
derives from the tools. `evaluator` answers with it, `policy_cases` tests it, and `backtest` compares it with history.
"""

import hashlib
import pickle
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from interlock.policy.action import ProposedAction, ToolFacts
from interlock.policy.backtest import DecisionChange, replay
from interlock.policy.cases import CaseResult, CasesInvalid, run_cases
from interlock.policy.comparison import what_passes_more
from interlock.policy.decision import ApprovalDemand, Asker, Circumstances, Decision, PolicyAnswer
from interlock.policy.evaluator import CompiledPolicy
from interlock.policy.rules import PolicyInvalid, Reading, read_policy
from interlock.policy.schema import cedar_schema

__all__ = [
    "DEFAULT_POLICY",
    "ApprovalDemand",
    "Asker",
    "CaseResult",
    "CasesInvalid",
    "Circumstances",
    "CompiledPolicy",
    "Decision",
    "DecisionChange",
    "PolicyAnswer",
    "PolicyInvalid",
    "cedar_schema",
    "change_views",
    "check_policy",
    "compile_policy",
    "decide_by",
    "deny_everything",
    "digest_of_text",
    "evaluate_by",
    "load_policy",
    "policy_is_imported",
    "replay",
    "results_of_cases",
    "run_cases",
    "what_passes_more",
]

# The policy of a tenant that has not published one.
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


def compile_policy(text: str, tools: Iterable[ToolFacts], *, file: str = "policy") -> CompiledPolicy:
    """Compile a policy for publication. Raise PolicyInvalid with every mistake."""
    reading = read_policy(text, tools, file)
    if faults := reading.faults():
        raise PolicyInvalid(faults)
    return CompiledPolicy(reading, digest=digest_of_text(text), text=text)


def load_policy(text: str | None, tools: Iterable[ToolFacts]) -> CompiledPolicy:
    """Compile a stored policy, which was valid when it was published. Never raises.

    Annotations unknown to this version ask for approval with tier high. Rules about tools that this process does not
    have never apply. Any other mistake denies everything.
    """
    if text is None:
        return deny_everything(
            "no policy is published, so nothing may be done; publish one: interlock policy apply FILE"
        )
    reading = read_policy(text, tools, "policy")
    if reading.broken or reading.policy_set is None:
        wrong = "; ".join(str(fault) for fault in reading.broken.sorted()[:3]) or "it has too many faults"
        why = f"the published policy is not valid any more, so nothing may be done until it is fixed: {wrong}"
        return deny_everything(why, digest=digest_of_text(text))
    return CompiledPolicy(reading, digest=digest_of_text(text), text=text)


def deny_everything(why: str, *, digest: str | None = None) -> CompiledPolicy:
    return CompiledPolicy(Reading("policy"), digest=digest, refusal=why)


def digest_of_text(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


# ---------------------------------------------------------------- for worker processes
# A compiled policy cannot be pickled: these functions take its text and return plain values.


def check_policy(text: str, tools: Sequence[ToolFacts]) -> str:
    """Return the digest of a policy that may be published. Raise PolicyInvalid."""
    digest = compile_policy(text, tools).digest
    assert digest is not None
    return digest


def decide_by(
    text: str, tools: Sequence[ToolFacts], action: ProposedAction, asker: Asker, when: Circumstances
) -> Decision:
    """Return the decision of an unpublished policy. Raise PolicyInvalid."""
    return compile_policy(text, tools).decide(action, asker, when)


def change_views(text: str, tools: Sequence[ToolFacts], recorded: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the recorded decisions that another policy would change. Raise PolicyInvalid."""
    return [change.as_dict() for change in replay(recorded, compile_policy(text, tools))]


def loosened_views(before: str, after: str, tools: Sequence[ToolFacts]) -> list[dict[str, Any]]:
    """Return made-up actions that need less under `after` than under a stored policy. Raise PolicyInvalid."""
    changes = what_passes_more(load_policy(before, tools), before, compile_policy(after, tools), after)
    return [change.as_dict() for change in changes]


def results_of_cases(text: str, tools: Sequence[ToolFacts], cases: str) -> list[CaseResult]:
    """Return the results of a policy's cases. Raise PolicyInvalid and CasesInvalid."""
    return run_cases(compile_policy(text, tools), cases, tools)


def evaluate_by(text: str, tools: bytes, action: ProposedAction, asker: Asker, when: Circumstances) -> Decision:
    """Return the decision of a stored policy. `tools` is pickled, so that it can serve as a cache key."""
    return _stored(text, tools).decide(action, asker, when)


@lru_cache(maxsize=4)
def _stored(text: str, tools: bytes) -> CompiledPolicy:
    return load_policy(text, pickle.loads(tools))


def policy_is_imported() -> None:
    """Do nothing, to make a process import everything that policies need."""
