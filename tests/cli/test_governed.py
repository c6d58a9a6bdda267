"""The command line's contract for policies, approvals, receipts and grants."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.cli.stub import NOW, Stub, a_run, an_approval, problem, refused, run

from interlock import clock

CEDAR = '@id("reads") permit(principal, action in Action::"read", resource);\n'
PUBLISHED = {"version": 3, "digest": "ab12", "created_at": NOW.isoformat()}
FAULT = {"file": "policy", "line": 2, "path": "large", "message": "@tier: no such tier `hgih`"}
SECOND = {"file": "policy", "line": 7, "path": "freeze", "message": "no tool or group is called `shp`"}
INVALID = problem(422, "POLICY_INVALID", "The policy is not valid", "…", errors=[FAULT, SECOND])
CHANGE = {
    "run_id": "run-1",
    "step": "refund",
    "at": NOW.isoformat(),
    "summary": "shop.refund on ch_1 for operator ann in run run-1 step refund",
    "before": {"answer": "allow", "tier": None, "two_person": False},
    "after": {"answer": "needs_approval", "tier": "high", "two_person": True},
    "reason": "refunds over 100 need two people",
    "rule_ids": ["large"],
    "errors": [],
}
SAME = {"decisions": 4, "changed": 0, "changes": [], "loosened": []}
LOOSER = SAME | {
    "loosened": [
        {"summary": "shop.refund for operator with amount = 5000", "before": {"answer": "needs_approval"},
         "after": {"answer": "allow"}, "passes_more": True, "rule_ids": ["small"]},
    ],
}  # fmt: skip
BACKTESTED = {"decisions": 120, "changed": 1, "changes": [CHANGE]}


def a_receipt(id: str = "rc-1", status: str = "succeeded", **more: Any) -> dict[str, Any]:
    base = {"id": id, "run_id": "run-1", "step_key": "refund", "tool": "shop.refund", "status": status, "attempt": 1}
    metadata = {"amount": {"type": "number"}, "note": {"type": "string", "size": 9}}
    return {**base, "idempotency_key": "shop:ch_1", "request_metadata": metadata, "created_at": NOW.isoformat(), **more}


def a_grant(**more: Any) -> dict[str, Any]:
    base = {"id": "gr-1", "tool": "shop.refund", "arguments": {"charge": "ch_1"}, "tier": "low", "created_by": "ann"}
    later = NOW + timedelta(hours=1)
    return {**base, "created_at": NOW.isoformat(), "expires_at": later.isoformat(), "uses": 2, **more}


def words(line: str) -> str:
    return " ".join(line.split())


@pytest.fixture
def cedar(url: str) -> str:
    Path("shop.cedar").write_text(CEDAR)
    return "shop.cedar"


# ---------------------------------------------------------------- publishing a policy


def test_apply_says_which_version_is_in_force(stub: Stub, cedar: str) -> None:
    stub.on("PUT /api/policy", PUBLISHED).on("POST /api/policy/backtest", SAME)
    assert run("policy", "apply", cedar).stdout == "version 3 is in force, digest ab12\n"
    assert [body.decode() for call, _, body, _ in stub.asked if call == "PUT /api/policy"] == [CEDAR]
    assert json.loads(run("policy", "apply", cedar, "--json").stdout)["version"] == 3


def test_apply_names_every_fault_with_the_local_file(stub: Stub, cedar: str) -> None:
    stub.on("PUT /api/policy", INVALID).on("POST /api/policy/backtest", SAME)
    result = run("policy", "apply", cedar)
    assert result.stdout.splitlines() == [
        "shop.cedar:2: large: @tier: no such tier `hgih`",
        "shop.cedar:7: freeze: no tool or group is called `shp`",
    ]
    assert refused(result) == "interlock: 2 mistakes in shop.cedar"


def test_faults_are_json_for_programs(stub: Stub, cedar: str) -> None:
    stub.on("PUT /api/policy", INVALID).on("POST /api/policy/backtest", SAME)
    result = run("policy", "apply", cedar, "--json")
    assert [fault["line"] for fault in json.loads(result.stdout)["faults"]] == [2, 7]
    assert json.loads(refused(result))["detail"] == "2 mistakes in shop.cedar"


def test_another_refusal_is_one_line(stub: Stub, cedar: str) -> None:
    stub.on("POST /api/policy/backtest", SAME).on(
        "PUT /api/policy", problem(403, "FORBIDDEN", "Not allowed", "that takes admin")
    )
    result = run("policy", "apply", cedar)
    assert (refused(result), result.stdout) == ("interlock: Not allowed: that takes admin", "")


@pytest.mark.parametrize(("answer", "published"), [("y\n", True), ("n\n", False), ("", False)])
def test_a_backtested_policy_is_published_only_after_a_yes(
    stub: Stub, cedar: str, answer: str, published: bool
) -> None:
    stub.on("POST /api/policy/backtest", BACKTESTED).on("PUT /api/policy", PUBLISHED)
    result = run("policy", "apply", cedar, "--backtest", input=answer)
    assert "1 of 120 recorded decisions would differ" in result.stdout
    assert [call for call, *_ in stub.asked][1:] == ["PUT /api/policy"] * published
    assert result.exit_code == (0 if published else 1)
    if not published:
        assert "interlock: Nothing was published. To publish without a question, give --yes." in result.stderr


def test_yes_is_not_asked_for_twice(stub: Stub, cedar: str) -> None:
    stub.on("POST /api/policy/backtest", BACKTESTED).on("PUT /api/policy", PUBLISHED)
    assert "Put it in force?" not in run("policy", "apply", cedar, "--backtest", "--yes").stdout
    found = json.loads(run("policy", "apply", cedar, "--backtest", "--yes", "--json").stdout)
    assert (found["version"], found["backtest"]["changed"]) == (3, 1)


@pytest.mark.parametrize("args", [["shop.cedar", "--json"], ["-"]])
def test_where_nobody_can_be_asked_nothing_is_published(stub: Stub, cedar: str, args: list[str]) -> None:
    assert "nobody can be asked" in refused(run("policy", "apply", "--backtest", *args, input=CEDAR), code=2)
    assert not stub.asked


def test_a_backtest_is_a_table_of_what_would_differ(stub: Stub, cedar: str) -> None:
    stub.on("POST /api/policy/backtest", BACKTESTED)
    _, row, _, summary = run("policy", "backtest", cedar, "--limit", "200").stdout.splitlines()
    assert words(row) == (
        "run-1 refund shop.refund on ch_1 allow → needs_approval (tier high, two people) "
        "refunds over 100 need two people"
    )
    assert summary == "1 of 120 recorded decisions would differ"
    assert stub.body("POST /api/policy/backtest") == {"policy": CEDAR, "limit": 200}
    assert json.loads(run("policy", "backtest", cedar, "--json").stdout)["changes"][0]["step"] == "refund"


@pytest.mark.parametrize(
    ("decisions", "says"),
    [
        (0, "nothing has been decided yet, so there is nothing to compare with\n"),
        (9, "none of 9 recorded decisions would differ\n"),
    ],
)
def test_a_backtest_without_differences_is_one_line(stub: Stub, cedar: str, decisions: int, says: str) -> None:
    stub.on("POST /api/policy/backtest", {"decisions": decisions, "changed": 0, "changes": []})
    assert run("policy", "backtest", cedar).stdout == says


def test_the_policy_in_force_can_be_edited_and_applied_again(stub: Stub) -> None:
    text = CEDAR + "\t// \x1b[2Jnobody sees this\n"
    stub.on("GET /api/policy", {**PUBLISHED, "text": text})
    shown = run("policy", "show").stdout
    assert words(shown.splitlines()[0]) == "version 3" and "\\x1b[2J" in shown and "\x1b" not in shown
    assert run("policy", "show", "--text").stdout == text
    assert json.loads(run("policy", "show", "--json").stdout)["text"] == text


def test_version_0_is_named_for_what_it_is(stub: Stub) -> None:
    stub.on("GET /api/policy", {**PUBLISHED, "version": 0, "text": CEDAR})
    assert "0, the one that every tenant starts with" in run("policy", "show").stdout


# ---------------------------------------------------------------- trying a policy out


def test_evaluate_says_what_would_be_decided_and_why(stub: Stub, cedar: str) -> None:
    action = {"tool": "shop.refund", "fields": {"amount": 250}, "digest": "d1"}
    decision = {"answer": "needs_approval", "tier": "high", "two_person": True, "rule_ids": ["large"], "reason": "big"}
    stub.on("POST /api/policy/evaluate", {**decision, "policy_digest": "p1", "action": action})
    args = [
        "policy",
        "evaluate",
        "shop.refund",
        "--param",
        "amount=250",
        "--role",
        "agent",
        "--hour",
        "23",
        "--group",
        "ops",
    ]
    result = run(*args, "--policy", cedar)
    lines = [words(line) for line in result.stdout.splitlines()]
    assert lines[:5] == ["answer needs_approval", "why big", "rules large", "tier high, two people", "policy p1"]
    assert lines[-1] == "amount 250"
    sent = {
        "tool": "shop.refund",
        "input": {"amount": 250},
        "role": "agent",
        "groups": ["ops"],
        "workflow": "",
        "hour": 23,
    }
    assert stub.body("POST /api/policy/evaluate") == {**sent, "policy": CEDAR}
    assert json.loads(run(*args, "--json").stdout)["rule_ids"] == ["large"]


def test_evaluating_by_a_broken_file_names_its_faults(stub: Stub, cedar: str) -> None:
    stub.on("POST /api/policy/evaluate", INVALID)
    result = run("policy", "evaluate", "shop.refund", "--policy", cedar)
    assert refused(result) == "interlock: 2 mistakes in shop.cedar"
    assert result.stdout.startswith("shop.cedar:2: large: ")


TOOLS = """
from interlock import tool

@tool("cases_shop.lookup")
def lookup(charge: str): ...

@tool("cases_shop.refund", writes=True, risk="high")
def refund(charge: str, amount: int): ...
"""
RULES = """
@id("reads") permit(principal, action in Action::"read", resource);
@id("small") permit(principal, action == Action::"cases_shop.refund", resource) when { context.input.amount <= 100 };
"""
CASES = """
- {name: looking is free, tool: cases_shop.lookup, expect: allow}
- {name: small refunds pass, tool: cases_shop.refund, input: {amount: 100}, expect: allow, rules: [small]}
"""
WRONG = "- {name: large refunds pass, tool: cases_shop.refund, input: {amount: 101}, expect: allow}\n"


@pytest.fixture
def tools(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cases_shop.py").write_text(TOOLS)
    monkeypatch.setenv("INTERLOCK_TOOLS", str(tmp_path / "cases_shop.py"))
    # Tools of the same names from another test's file would be different definitions.
    monkeypatch.setattr("interlock.tools.registry._tools", {})
    Path("rules.cedar").write_text(RULES)
    Path("rules.cases.yaml").write_text(CASES)


def test_cases_next_to_a_policy_are_run_without_a_server(tools: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLOCK_URL", "http://127.0.0.1:1")
    result = run("policy", "test", "rules.cedar")
    assert [words(line) for line in result.stdout.splitlines()] == [
        "CASE EXPECTED GOT WHY",
        "✓ looking is free allow allow by reads",
        "✓ small refunds pass allow; by rule small allow by small",
    ]
    assert (result.exit_code, result.stderr) == (0, "")


def test_a_case_that_fails_fails_the_command(tools: None) -> None:
    Path("other.yaml").write_text(CASES + WRONG)
    result = run("policy", "test", "rules.cedar", "other.yaml")
    assert words(result.stdout.splitlines()[-1]).startswith("✗ large refunds pass allow deny ")
    assert refused(result) == "interlock: 1 of 3 cases failed"
    found = json.loads(run("policy", "test", "rules.cedar", "other.yaml", "--json").stdout)
    assert (found["ok"], [case["passed"] for case in found["cases"]]) == (False, [True, True, False])


def test_mistakes_in_policy_and_cases_have_their_file_and_line(tools: None) -> None:
    Path("broken.cedar").write_text(
        RULES + '@id("typo") permit(principal, action == Action::"cases_shop.lokup", resource);'
    )
    result = run("policy", "test", "broken.cedar", "rules.cases.yaml")
    assert result.stdout.startswith("broken.cedar:4: ") and "cases_shop.lookup" in result.stdout
    assert refused(result) == "interlock: 1 mistake in broken.cedar"
    Path("broken.yaml").write_text(CASES + "- {tool: cases_shop.refund, expct: allow}\n")
    result = run("policy", "test", "rules.cedar", "broken.yaml", "--json")
    found = json.loads(result.stdout)
    assert not found["ok"] and {fault["file"] for fault in found["faults"]} == {"broken.yaml"}
    assert "in broken.yaml" in refused(result)


def test_what_a_test_of_a_policy_lacks_is_one_line(tools: None, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("lonely.cedar").write_text(RULES)
    assert refused(run("policy", "test", "lonely.cedar")) == "interlock: lonely.cases.yaml: No such file or directory"
    assert "name their file" in refused(run("policy", "test", "-", input=RULES), code=2)
    monkeypatch.setenv("INTERLOCK_TOOLS", "")
    assert "INTERLOCK_TOOLS" in refused(run("policy", "test", "rules.cedar"))


# ---------------------------------------------------------------- approvals


def test_an_approval_says_who_decides_why_and_until_when(stub: Stub) -> None:
    fields = {"amount": 250, "note": "first line\nsecond line", "memo": "", "tags": ["a", "b"]}
    action = {"tool": "shop.refund", "target": "ch_1", "fields": fields, "digest": "d1"}
    rationale = {"rule_ids": ["large", "vip"], "reason": "over 100", "policy_digest": "p1"}
    until = clock.now() + timedelta(hours=3, minutes=10, seconds=30)
    stub.on(
        "GET /api/approvals/ap-1",
        an_approval(
            kind="action", action=action, rationale=rationale, expires_at=until.isoformat(),
            approvers=["finance", "sre"], excluded=["ada"], reason_required=True, requested_by="ada",
        ),
    )  # fmt: skip
    result = run("approval", "show", "ap-1")
    lines = [words(line) for line in result.stdout.splitlines()]
    assert "kind action The policy asks for a person before this action." in lines
    assert "may decide members of finance or sre except ada; a reason is required" in lines
    assert {"why over 100", "rules large, vip", "tier high, two people", "asked by ada"} <= set(lines)
    assert any(line.startswith("time left 3h10m, until ") for line in lines)
    at = lines.index("fields")
    assert lines[at + 1 : at + 6] == ["amount 250", "note first line", "second line", 'memo ""', 'tags ["a", "b"]']
    assert json.loads(run("approval", "show", "ap-1", "--json").stdout)["approvers"] == ["finance", "sre"]


def test_a_gate_that_anybody_decides_and_that_is_over_says_so(stub: Stub) -> None:
    over = (clock.now() - timedelta(hours=1)).isoformat()
    stub.on("GET /api/approvals/ap-1", an_approval(expires_at=over))
    out = run("approval", "show", "ap-1").stdout
    assert "any approver" in out and "none, until" in out
    stub.on("GET /api/approvals/ap-1", an_approval(status="expired", expires_at=over))
    assert "time left" not in run("approval", "show", "ap-1").stdout


def test_an_effect_in_doubt_shows_the_three_choices(stub: Stub) -> None:
    stub.on("GET /api/approvals/ap-1", an_approval(kind="in_doubt", receipt_id="rc-1"))
    lines = [words(line) for line in run("approval", "show", "ap-1").stdout.splitlines()]
    assert lines[-4:] == [
        "what became of it?",
        "it happened interlock receipt resolve rc-1 --happened --output JSON",
        "it did not happen interlock receipt resolve rc-1 --did-not-happen",
        "fail the run interlock receipt resolve rc-1 --fail",
    ]
    stub.on("GET /api/approvals/ap-1", an_approval(kind="in_doubt", receipt_id="rc-1", status="approved"))
    assert "what became" not in run("approval", "show", "ap-1").stdout


def test_approving_an_effect_in_doubt_says_what_to_type_instead(stub: Stub) -> None:
    doubt = problem(409, "EFFECT_IN_DOUBT", "Not possible", "not a yes-or-no question", receipt_id="rc-1")
    stub.on("POST /api/approvals/ap-1/approve", doubt)
    assert "interlock receipt resolve rc-1 --happened" in refused(run("approval", "approve", "ap-1"))


def test_an_edited_action_is_sent_as_a_patch(stub: Stub) -> None:
    stub.on("POST /api/approvals/ap-1/approve", an_approval())
    assert run("approval", "approve", "ap-1", "--patch", '{"amount": 80, "note": null}').exit_code == 0
    assert stub.body("POST /api/approvals/ap-1/approve") == {"patch": {"amount": 80, "note": None}}
    assert "--patch" in refused(run("approval", "approve", "ap-1", "--patch", "80"), code=2)


def test_a_bulk_decision_is_answered_line_by_line(stub: Stub) -> None:
    late = {"type": "x", "title": "Too late", "status": 409, "detail": "it is rejected", "code": "APPROVAL_DECIDED"}
    items = [
        {"id": "ap-1", "ok": True, "status": "approved"},
        {"id": "ap-2", "ok": True, "status": "requested"},
        {"id": "ap-3", "ok": False, "problem": late},
    ]
    stub.on("POST /api/approvals/decide", {"items": items, "next_cursor": None})
    result = run("approval", "decide", "--approve", "ap-1", "ap-2", "ap-3", "--reason", "ok")
    assert result.stdout.splitlines() == [
        "✓ ap-1  approved",
        "✓ ap-2  Your vote is recorded. One more approver is needed.",
        "✗ ap-3  Too late: it is rejected (APPROVAL_DECIDED)",
    ]
    assert refused(result) == "interlock: 1 of 3 refused"
    sent = {"ids": ["ap-1", "ap-2", "ap-3"], "decision": "approve", "reason": "ok"}
    assert stub.body("POST /api/approvals/decide") == sent
    result = run("approval", "decide", "--reject", "ap-1", "--json")
    assert [item["ok"] for item in json.loads(result.stdout)["items"]] == [True, True, False]


def test_a_bulk_decision_sends_the_digest_of_each_action(stub: Stub) -> None:
    """security M2: a batch had no field for a digest."""
    stub.on("POST /api/approvals/decide", {"items": [{"id": "ap-1", "ok": True, "status": "approved"}]})
    assert run("approval", "decide", "--approve", "ap-1:sha256:ab", "ap-2").exit_code == 0
    sent = {"ids": ["ap-1", "ap-2"], "decision": "approve", "digests": {"ap-1": "sha256:ab"}}
    assert stub.body("POST /api/approvals/decide") == sent


def test_an_edited_action_shows_what_was_changed_and_by_whom(stub: Stub) -> None:
    changes = [{"field": "to", "before": "ada", "after": "eve\u202e"}]
    edits: dict[str, Any] = {"edited_by": ["quinn"], "edited_at": NOW.isoformat(), "changes": changes}
    stub.on("GET /api/approvals/ap-1", an_approval(**edits))
    lines = [words(line) for line in run("approval", "show", "ap-1").stdout.splitlines()]
    assert "to ada → eve\\u202e" in lines[lines.index("changed after it was proposed") :]
    assert any(line.startswith("changed ") and line.endswith(" by quinn") for line in lines)


def test_a_vote_without_the_digest_of_an_edited_action_is_told_the_digest(stub: Stub) -> None:
    refusal = problem(409, "ACTION_DIGEST_REQUIRED", "Not possible", "quinn changed the action.", digest="sha256:cd")
    for call, command in (
        ("POST /api/approvals/ap-1/approve", ("approval", "approve", "ap-1")),
        ("POST /api/runs/run-1/approve", ("run", "approve", "run-1")),
    ):
        stub.on(call, refusal)
        said = refused(run(*command))
        assert said == "interlock: quinn changed the action. The digest of the action is now sha256:cd (--digest)."
        stub.on(call, an_approval() if command[0] == "approval" else a_run())
        assert run(*command, "--digest", "sha256:cd").exit_code == 0
        assert json.loads([body for asked, _, body, _ in stub.asked if asked == call][1]) == {"digest": "sha256:cd"}


def test_the_first_of_two_votes_reads_as_a_success(stub: Stub) -> None:
    """new-user 14: the message read "You cannot approve this: you have voted"."""
    voted = an_approval(voted=True, approvers_needed=1, barred="Your vote is already recorded.")
    stub.on("POST /api/approvals/ap-1/approve", voted)
    stub.on("POST /api/runs/run-1/approve", a_run(status="waiting_approval"))
    stub.on("GET /api/approvals", {"items": [voted], "next_cursor": None})
    for command in (("approval", "approve", "ap-1"), ("run", "approve", "run-1")):
        result = run(*command)
        assert result.stdout.splitlines()[-1] == "Your vote is recorded. One more approver is needed."
        assert "cannot" not in result.stdout and result.exit_code == 0


def test_who_changes_an_action_is_told_that_it_is_changed(stub: Stub) -> None:
    stub.on("POST /api/approvals/ap-1/approve", an_approval(barred="you changed it, so another person must approve it"))
    result = run("approval", "approve", "ap-1", "--patch", '{"amount": 80}')
    assert result.stdout.splitlines()[-1] == "The action is changed. Another person has to approve it."
    assert "cannot" not in result.stdout


@pytest.mark.parametrize("flags", [[], ["--approve", "--reject"]])
def test_a_bulk_decision_is_never_guessed(stub: Stub, flags: list[str]) -> None:
    assert "give one of the two" in refused(run("approval", "decide", *flags, "ap-1"), code=2)
    assert not stub.asked


# ---------------------------------------------------------------- receipts


def test_the_effects_of_a_run_are_listed(stub: Stub) -> None:
    done = a_receipt(reversible=True, completed_at=(NOW + timedelta(seconds=2)).isoformat())
    undone = a_receipt("rc-2", reversible=True, reversal={"run_id": "run-2"})
    stub.on("GET /api/runs/run-1/receipts", {"items": [done, undone, a_receipt("rc-3", "in_doubt")]})
    rows = [line.split() for line in run("receipt", "list", "run-1").stdout.splitlines()[1:]]
    assert [(row[0], row[3]) for row in rows] == [("rc-1", "succeeded"), ("rc-2", "succeeded"), ("rc-3", "in_doubt")]
    assert (rows[0][5], rows[0][-1], rows[1][5]) == ("possible", "2.0s", "undone")
    assert len(json.loads(run("receipt", "list", "run-1", "--json").stdout)["items"]) == 3


def test_a_receipt_shows_the_shape_of_what_was_sent(stub: Stub) -> None:
    reversal = {"run_id": "run-2", "by": "ann", "reason": "wrong\ncard", "at": NOW.isoformat()}
    stub.on("GET /api/receipts/rc-1", a_receipt(undo="shop.undo_refund", reversible=True))
    lines = [words(line) for line in run("receipt", "show", "rc-1").stdout.splitlines()]
    assert {"undo possible, with shop.undo_refund", 'amount {"type": "number"}'} <= set(lines)
    stub.on("GET /api/receipts/rc-1", a_receipt(reversal=reversal))
    assert "undone by run run-2, asked by ann, wrong card" in run("receipt", "show", "rc-1").stdout
    stub.on("GET /api/receipts/rc-1", a_receipt(status="in_doubt"))
    assert "interlock receipt resolve rc-1 --did-not-happen" in run("receipt", "show", "rc-1").stdout


@pytest.mark.parametrize(
    ("flags", "sent"),
    [
        (["--happened", "--output", '{"id": 1}'], {"outcome": "happened", "output": {"id": 1}}),
        (["--did-not-happen", "--reason", "looked"], {"outcome": "did_not_happen", "reason": "looked"}),
        (["--fail"], {"outcome": "fail"}),
    ],
)
def test_what_is_in_doubt_is_settled_by_one_of_three_words(stub: Stub, flags: list[str], sent: dict[str, Any]) -> None:
    stub.on("POST /api/receipts/rc-1/resolve", a_receipt())
    assert run("receipt", "resolve", "rc-1", *flags).exit_code == 0
    assert stub.body("POST /api/receipts/rc-1/resolve") == sent


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "give one of the three"),
        (["--happened", "--fail"], "give one of the three"),
        (["--fail", "--output", "1"], "only what happened has an output"),
        (["--happened", "--output", "{"], "not JSON"),
    ],
)
def test_what_became_of_an_effect_is_never_guessed(stub: Stub, flags: list[str], says: str) -> None:
    assert says in refused(run("receipt", "resolve", "rc-1", *flags), code=2)
    assert not stub.asked


def test_reversing_shows_the_run_that_does_it(stub: Stub) -> None:
    stub.on("POST /api/receipts/rc-1/reverse", a_run("run-2", "waiting_approval"))
    assert words(run("receipt", "reverse", "rc-1", "--reason", "oops").stdout.splitlines()[0]) == "run run-2"
    assert stub.body("POST /api/receipts/rc-1/reverse") == {"reason": "oops"}
    undone = problem(409, "ALREADY_REVERSED", "Not possible", "it was undone already, by run run-2")
    stub.on("POST /api/receipts/rc-1/reverse", undone)
    assert refused(run("receipt", "reverse", "rc-1")).endswith("it was undone already, by run run-2")


# ---------------------------------------------------------------- grants


def test_a_grant_is_given_for_a_tool_some_arguments_and_a_time(stub: Stub) -> None:
    stub.on("POST /api/grants", a_grant())
    args = ["grant", "give", "shop.refund", "--arg", "charge=ch_1", "--arg", "amount=5", "--tier", "med"]
    result = run(*args, "--for", "30m", "--reason", "tonight")
    assert result.stdout.splitlines()[1].split()[:6] == ["gr-1", "shop.refund", "charge=ch_1", "low", "ann", "2"]
    sent = {"tool": "shop.refund", "arguments": {"charge": "ch_1", "amount": 5}, "tier": "med", "reason": "tonight"}
    assert stub.body("POST /api/grants") == {**sent, "expires_in": 1800}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tier", "high"], "high is decided by people, each time"),
        (["--for", "8d"], "a grant lasts at most 7d"),
        (["--for", "soon"], "Invalid value for --for: 'soon' is not a duration"),
        (["--arg", "charge"], "Invalid value for --arg: expected name=value, not 'charge'"),
        ([], "name the arguments that it covers, or give --any-arguments"),
        (["--any-arguments", "--arg", "charge=ch_1"], "give one of the two"),
    ],
)
def test_a_grant_that_cannot_be_is_one_line(stub: Stub, flags: list[str], says: str) -> None:
    assert says in refused(run("grant", "give", "shop.refund", *flags), code=2)
    assert not stub.asked


def test_a_grant_for_every_call_of_a_tool_says_so(stub: Stub) -> None:
    """security L10"""
    stub.on("POST /api/grants", a_grant())
    assert run("grant", "give", "shop.tag", "--any-arguments").exit_code == 0
    sent = {"tool": "shop.tag", "arguments": {}, "any_arguments": True, "tier": "low", "expires_in": 3600}
    assert stub.body("POST /api/grants") == sent


def test_grants_are_listed_and_revoked(stub: Stub) -> None:
    stub.on("GET /api/grants", {"items": [a_grant(arguments={})], "next_cursor": None})
    assert run("grant", "list").stdout.splitlines()[1].split()[2] == "any"
    run("grant", "list", "--all")
    assert [query for _, query, *_ in stub.asked] == [{}, {"all": "true"}]
    stub.on("DELETE /api/grants/gr-1", a_grant(revoked_at=NOW.isoformat()))
    assert run("grant", "revoke", "gr-1").stdout == "revoked gr-1, used 2 times\n"
    assert json.loads(run("grant", "revoke", "gr-1", "--json").stdout)["revoked_at"]
    stub.on("DELETE /api/grants/gr-1", a_grant(uses=1, revoked_at=NOW.isoformat()))
    assert run("grant", "revoke", "gr-1").stdout == "revoked gr-1, used once\n"


# ---------------------------------------------------------------- keys and tenants


def test_a_key_can_belong_to_groups(stub: Stub) -> None:
    key = {"id": "k-1", "name": "ann", "role": "approver", "created_at": NOW.isoformat(), "key": "il_s"}
    stub.on("POST /api/keys", {**key, "groups": ["finance", "sre"]})
    result = run("key", "create", "ann", "--role", "approver", "--group", "finance", "--group", "sre")
    assert "groups  finance, sre" in result.stdout
    assert stub.body("POST /api/keys")["groups"] == ["finance", "sre"]


def test_a_tenant_has_caps(stub: Stub) -> None:
    tenant = {"id": "t-1", "name": "acme", "created_at": NOW.isoformat(), "key": "il_a", "max_runs_per_min": 60}
    stub.on("POST /api/tenants", {**tenant, "max_writes_per_run": 10})
    result = run("tenant", "create", "acme", "--max-runs-per-min", "60", "--max-writes-per-run", "10")
    assert "60 runs per minute, 10 writes per run" in result.stdout
    sent = {"name": "acme", "weight": 1.0, "max_runs_per_min": 60, "max_writes_per_run": 10}
    assert stub.body("POST /api/tenants") == sent
    stub.on("GET /api/tenants", {"items": [{**tenant, "max_runs_per_min": None}]})
    assert run("tenant", "list").stdout.splitlines()[1].split()[2] == "none"


def test_a_policy_that_lets_more_pass_is_published_only_if_a_person_or_a_flag_says_so(stub: Stub, cedar: str) -> None:
    """new-user 12: one command replaced the policy with one that permits everything, without a confirmation."""
    stub.on("POST /api/policy/backtest", LOOSER).on("PUT /api/policy", PUBLISHED)
    said = run("policy", "apply", cedar, input="n\n")
    assert said.exit_code == 1 and "lets more pass" in said.stdout and "amount = 5000" in said.stdout
    assert [call for call, *_ in stub.asked] == ["POST /api/policy/backtest"]
    assert "is in force" in run("policy", "apply", cedar, input="y\n").stdout
    assert "is in force" in run("policy", "apply", cedar, "--yes").stdout


def test_a_script_that_cannot_be_asked_publishes_nothing_looser_without_yes(stub: Stub, cedar: str) -> None:
    stub.on("POST /api/policy/backtest", LOOSER).on("PUT /api/policy", PUBLISHED)
    refused_ = run("policy", "apply", cedar, "--json")
    assert refused_.exit_code == 1 and "give --yes" in refused_.stderr
    assert "PUT /api/policy" not in [call for call, *_ in stub.asked]


def test_a_rollback_to_a_looser_policy_asks_too(stub: Stub) -> None:
    stub.on("GET /api/policy/versions/1", PUBLISHED | {"version": 1, "text": "permit"})
    stub.on("POST /api/policy/backtest", LOOSER).on("POST /api/policy/rollback", PUBLISHED)
    assert run("policy", "rollback", "1", input="n\n").exit_code == 1
    assert "it has the text of version 1" in run("policy", "rollback", "1", "--yes").stdout
