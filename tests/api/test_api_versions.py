"""Policies and workflows: clients can list, show, compare and roll back versions (new-user 13)."""

from typing import Any

from tests.rig import Rig

YAML = {"Content-Type": "application/yaml"}
ONE = "name: w\ndescription: first\nsteps:\n  - {id: a, wait: {duration: 1s}}\n"
TWO = ONE.replace("1s", "2s")
ALLOW = '@id("all") permit (principal, action, resource);\n'
DENY = '@id("none") forbid (principal, action, resource);\n'


async def test_a_policy_is_listed_shown_compared_and_rolled_back(rig: Rig) -> None:
    async with rig.http() as http:
        for text in (DENY, ALLOW):
            assert (await http.put("/api/policy", content=text)).status_code == 200
        listed = (await http.get("/api/policy/versions")).json()["items"]
        assert [(item["version"], item["in_force"]) for item in listed] == [(2, True), (1, False)]
        assert {item["created_by"] for item in listed} == {"admin"}

        shown = (await http.get("/api/policy/versions/1")).json()
        assert shown["text"] == DENY and shown["digest"] == listed[1]["digest"]
        found = (await http.get("/api/policy/versions", params={"digest": shown["digest"]})).json()["items"]
        assert [item["version"] for item in found] == [1]

        difference = (await http.get("/api/policy/versions/2/diff")).json()
        assert (difference["before"], difference["after"]) == (1, 2)
        assert f"-{DENY}" in difference["diff"] and f"+{ALLOW}" in difference["diff"]

        answer = await http.post("/api/policy/rollback", json={"version": 1})
        assert answer.status_code == 200, answer.text
        assert (answer.json()["version"], answer.json()["in_force"]) == (3, True)
        now = (await http.get("/api/policy")).json()
        assert (now["version"], now["text"]) == (3, DENY)


async def test_the_built_in_policy_is_version_0_and_can_be_compared(rig: Rig) -> None:
    async with rig.http() as http:
        shown = (await http.get("/api/policy/versions/0")).json()
        assert shown["in_force"] is True and "high-writes" in shown["text"]
        await http.put("/api/policy", content=ALLOW)
        difference = (await http.get("/api/policy/versions/1/diff")).json()["diff"]
        assert f"+{ALLOW}" in difference and '-@id("high-writes")' in difference
        back = (await http.post("/api/policy/rollback", json={"version": 0})).json()
        assert back["version"] == 2 and (await http.get("/api/policy")).json()["text"] == shown["text"]


async def test_a_workflow_is_listed_shown_compared_and_rolled_back(rig: Rig) -> None:
    async with rig.http() as http:
        for text in (ONE, TWO):
            await http.post("/api/workflows", content=text, headers=YAML)
        listed = (await http.get("/api/workflows/w/versions")).json()["items"]
        assert [(item["version"], item["created_by"]) for item in listed] == [
            (2, "admin"), (1, "admin"),
        ]  # fmt: skip
        assert (await http.get("/api/workflows/w/versions/1")).json()["source"]["steps"][0]["wait"] == {
            "duration": "1s"
        }
        difference = (await http.get("/api/workflows/w/versions/2/diff", params={"against": 1})).json()["diff"]
        assert "-    duration: 1s" in difference and "+    duration: 2s" in difference

        back = await http.post("/api/workflows/w/rollback", json={"version": 1})
        assert back.status_code == 201, back.text
        assert (back.json()["version"], back.json()["digest"]) == (3, listed[1]["digest"])
        run = await http.post("/api/runs", json={"workflow": "w"})
        assert run.json()["workflow_version"] == 3


async def test_rolling_back_to_the_content_in_force_makes_no_version(rig: Rig) -> None:
    async with rig.http() as http:
        for text in (ONE, TWO):
            await http.post("/api/workflows", content=text, headers=YAML)
        again = await http.post("/api/workflows/w/rollback", json={"version": 2})
        assert again.json()["version"] == 2
        # Applying content of an earlier version still answers with a version that contains it.
        await http.post("/api/workflows/w/rollback", json={"version": 1})
        assert (await http.post("/api/workflows", content=ONE, headers=YAML)).json()["version"] == 3
        assert (await http.get("/api/workflows/w")).json()["version"] == 3


async def test_publishing_the_policy_in_force_again_makes_no_version(rig: Rig) -> None:
    """A script that applies the same file each time made a version each time."""
    async with rig.http() as http:
        told = [(await http.put("/api/policy", content=text)).json()["version"] for text in (ALLOW, ALLOW, DENY, ALLOW)]
        assert told == [1, 1, 2, 3]
        assert (await http.post("/api/policy/rollback", json={"version": 1})).json()["version"] == 3
        assert (await http.get("/api/policy")).json()["version"] == 3


async def test_a_version_that_does_not_exist_is_named(rig: Rig) -> None:
    async with rig.http() as http:
        await http.post("/api/workflows", content=ONE, headers=YAML)
        calls: list[tuple[str, str, dict[str, Any] | None, str]] = [
            ("GET", "/api/policy/versions/7", None, "There is no version 7 of the policy."),
            ("GET", "/api/policy/versions/7/diff", None, "There is no version 7 of the policy."),
            ("POST", "/api/policy/rollback", {"version": 7}, "There is no version 7 of the policy."),
            ("GET", "/api/workflows/w/versions/7", None, "There is no version 7 of workflow w."),
            ("POST", "/api/workflows/w/rollback", {"version": 7}, "There is no version 7 of workflow w."),
            ("GET", "/api/workflows/w/versions/7/diff", None, "There is no version 7 of workflow w."),
            ("GET", "/api/workflows/nope/versions", None, "There is no workflow nope."),
        ]
        for method, path, body, detail in calls:
            answer = await http.request(method, path, json=body)
            assert (answer.status_code, answer.json()["detail"]) == (404, detail), path
        wrong = await http.get("/api/policy/versions", params={"cursor": "eHh4"})
        assert wrong.status_code == 422


async def test_a_rollback_needs_the_rights_of_a_publication(rig: Rig) -> None:
    async with rig.http() as http:
        for text in (ONE, TWO):
            await http.post("/api/workflows", content=text, headers=YAML)
        for text in (ALLOW, DENY):
            await http.put("/api/policy", content=text)
    async with rig.http(await rig.key("olga", "operator")) as operator:
        assert (await operator.post("/api/policy/rollback", json={"version": 1})).status_code == 403
    async with rig.http(await rig.key("vera", "viewer")) as viewer:
        assert (await viewer.post("/api/workflows/w/rollback", json={"version": 1})).status_code == 403
    async with rig.http(await rig.key("wes", "admin", workspace_id="blue")) as workspace_admin:
        assert (await workspace_admin.post("/api/policy/rollback", json={"version": 1})).status_code == 403
        refused = await workspace_admin.post("/api/workflows/w/rollback", json={"version": 1})
        assert refused.json()["code"] == "WORKFLOW_NAME_TAKEN"


async def test_publishing_says_what_passes_that_did_not_before(rig: Rig) -> None:
    """new-user 12: publishing gave no warning that high-risk writes now pass."""

    @rig.tool("bank.pay", writes=True, risk="high")
    async def pay(amount: int) -> None: ...

    async with rig.http() as http:
        tried = (await http.post("/api/policy/backtest", json={"policy": ALLOW})).json()
        assert any(each["summary"] == "bank.pay for operator" and each["passes_more"] for each in tried["loosened"])
        published = (await http.put("/api/policy", content=ALLOW)).json()
        assert published["version"] == 1 and published["loosened"] == tried["loosened"]
        assert (await http.put("/api/policy", content=ALLOW + DENY)).json()["loosened"] == []
