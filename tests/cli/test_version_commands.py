"""`workflow` and `policy` `versions`, `diff`, `rollback`: list, compare and restore earlier versions."""

import pytest
from tests.cli.stub import NOW, Stub, run

DIFF = {"before": 1, "after": 3, "diff": "--- version 1\n+++ version 3\n@@ -1 +1 @@\n-old\x1b[2J\n+new\n"}


def a_version(number: int, **more: object) -> dict[str, object]:
    return {"name": "refund", "version": number, "digest": f"sha256:{number}", "created_at": NOW.isoformat(), **more}


@pytest.mark.parametrize(("command", "path"), [(["workflow"], "workflows/refund"), (["policy"], "policy")])
def test_versions_are_listed_and_compared(stub: Stub, command: list[str], path: str) -> None:
    named = ["refund"] if command == ["workflow"] else []
    by = {} if named else {"created_by": "admin:1", "source": "text"}
    stub.on(f"GET /api/{path}/versions", {"items": [a_version(3, **by), a_version(1, **by)], "next_cursor": None})
    head, newest, oldest = run(*command, "versions", *named).stdout.splitlines()
    assert "VERSION" in head and " 3 " in f" {newest} " and " 1 " in f" {oldest} "
    stub.on(f"GET /api/{path}/versions/3/diff", DIFF)
    compared = run(*command, "diff", *named, "3", "--against", "1")
    assert compared.exit_code == 0 and stub.asked[-1][1] == {"against": "1"}, compared.stderr
    assert "-old\\x1b[2J" in compared.stdout and "+new" in compared.stdout


def test_a_workflow_is_rolled_back(stub: Stub) -> None:
    stub.on("POST /api/workflows/refund/rollback", a_version(4))
    result = run("workflow", "rollback", "refund", "1")
    assert result.stdout == "Version 4 of refund has the content of version 1. New runs start with it.\n"
    assert stub.body("POST /api/workflows/refund/rollback")["version"] == 1
