"""`interlock run batch`: many inputs in as many requests as necessary, and its progress."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.stub import Stub, a_run, problem, refused, run

BATCH = "POST /api/runs/batch"


def page(runs: int) -> dict[str, Any]:
    return {"items": [a_run(f"run-{n}", "pending") for n in range(runs)], "next_cursor": None}


def sent(stub: Stub) -> list[dict[str, Any]]:
    return [json.loads(body) for _, _, body, _ in stub.asked]


def test_the_inputs_of_a_file_are_sent_together(stub: Stub) -> None:
    Path("in.json").write_text('[{"charge": "ch_1"}, {"charge": "ch_2"}]')
    stub.on(BATCH, page(2))
    result = run("run", "batch", "refund", "--inputs", "@in.json", "--version", "3", "--deadline", "1h")
    assert (result.exit_code, result.stdout) == (0, "2 runs of refund started\n")
    assert sent(stub) == [
        {
            "workflow": "refund",
            "version": 3,
            "inputs": [{"charge": "ch_1"}, {"charge": "ch_2"}],
            "trigger": {"source": "cli"},
            "deadline_seconds": 3600,
        }
    ]


def test_more_than_a_request_takes_are_several_with_a_key_each(stub: Stub) -> None:
    Path("in.json").write_text(json.dumps([{"n": n} for n in range(2001)]))
    stub.on(BATCH, page(1000), page(1000), page(1))
    result = run("run", "batch", "refund", "--inputs", "@in.json", "--idempotency-key", "may", "--json")
    assert len(json.loads(result.stdout)["items"]) == 2001
    assert [len(body["inputs"]) for body in sent(stub)] == [1000, 1000, 1]
    assert [one["n"] for body in sent(stub) for one in body["inputs"]] == list(range(2001))
    assert [headers["idempotency-key"] for _, _, _, headers in stub.asked] == ["may:0", "may:1", "may:2"]


def test_large_inputs_are_parted_by_their_size(stub: Stub) -> None:
    Path("in.json").write_text(json.dumps([{"text": "x" * 400_000}] * 5))
    stub.on(BATCH, page(2), page(2), page(1))
    assert run("run", "batch", "refund", "--inputs", "@in.json").stdout == "5 runs of refund started\n"
    assert [len(body["inputs"]) for body in sent(stub)] == [2, 2, 1]
    assert all(len(body) < 1_000_000 for _, _, body, _ in stub.asked)


def test_who_is_stopped_half_way_is_told_how_far_it_came(stub: Stub) -> None:
    Path("in.json").write_text(json.dumps([{}] * 1500))
    stub.on(BATCH, page(1000), problem(429, "RATE_LIMITED", "Too many", "the next free place is in 30 s"))
    result = run("run", "batch", "refund", "--inputs", "@in.json")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[0] == "1,000 of 1,500 runs were started"
    assert "in 30 s" in result.stderr.splitlines()[1]


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ("[]", "the list is empty"),
        ('{"x": 1}', "expected a list"),
        ('[{"x": 1}, 7]', "number 2 is 7"),
        ("[{", "not JSON"),
    ],
)
def test_what_are_no_inputs_is_one_line_and_nothing_is_sent(stub: Stub, inputs: str, says: str) -> None:
    assert says in refused(run("run", "batch", "refund", "--inputs", inputs), code=2)
    assert stub.asked == []
