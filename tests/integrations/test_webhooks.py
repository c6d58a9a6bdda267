"""Webhooks out: signed, with a stable id, retried, and never into the network that we run in."""

import asyncio
import base64
import socket
from datetime import datetime
from typing import Any

import asyncpg
import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from interlock import clock
from interlock.engine import outbox
from interlock.engine.access import encryption
from interlock.engine.access.key_store import SecretsKey
from interlock.engine.access.secrets import Secrets, Use
from interlock.engine.ingress import url_guard
from interlock.errors import Conflict, Terminal
from interlock.integrations import Dispatcher
from interlock.settings import Settings
from tests.integrations.conftest import Stub
from tests.rig import Rig

GATE = "name: a\nsteps: [{id: ok, approval: {tier: low, summary: 'for ${input.who}'}}]"
QUICK = "name: q\nsteps: [{id: one, tool: t.one, input: {}}]"


class ReceiversTime(datetime):
    """A receiver rejects old messages by its own clock, which agrees with ours."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return clock.now()


@pytest.fixture(autouse=True)
def _receivers_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("standardwebhooks.webhooks.datetime", ReceiversTime)


async def hooked(rig: Rig, url: str, **body: Any) -> dict[str, Any]:
    answer = await rig.http().post("/api/webhooks", json={"url": url, **body})
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def test_messages_are_signed_and_carry_no_values(rig: Rig, stub: Stub, dispatcher: Dispatcher) -> None:
    made = await hooked(rig, f"{stub.url}/in")
    await rig.apply(GATE)
    run_id = await rig.start("a", {"who": "the-secret-customer"})
    await rig.approve(run_id)
    await dispatcher.deliver_due()
    said = [Webhook(made["secret"]).verify(r.body, r.headers) for r in stub.at("/in")]
    assert sorted(s["type"] for s in said) == ["approval.requested", "approval.resolved", "run.completed"]
    by = {s["type"]: s["data"] for s in said}
    assert (by["approval.requested"]["status"], by["approval.resolved"]["status"]) == ("requested", "approved")
    assert {k: by["run.completed"][k] for k in ("run_id", "status", "reason", "workflow")} == {
        "run_id": str(run_id), "status": "succeeded", "reason": "completed", "workflow": "a",
    }  # fmt: skip
    assert b"the-secret-customer" not in b"".join(r.body for r in stub.received)
    assert len({r.headers["webhook-id"] for r in stub.received}) == 3
    with pytest.raises(WebhookVerificationError):
        Webhook(outbox.new_secret()).verify(stub.received[0].body, stub.received[0].headers)


async def test_messages_link_to_the_console_when_its_address_is_known(rig: Rig, stub: Stub, settings: Any) -> None:
    """new-user 16: messages had no link to the run or the approval."""
    settings.public_url = "https://interlock.example/"
    sender = Dispatcher(rig.database, settings)
    await hooked(rig, f"{stub.url}/in")
    await rig.apply(GATE)
    run_id = await rig.start("a", {"who": "x"})
    await rig.approve(run_id)
    await sender.deliver_due()
    await sender.close()
    (approval,) = await rig.sql("SELECT id FROM interlock.approval")
    assert {r.json["type"]: r.json["data"]["url"] for r in stub.at("/in")} == {
        "approval.requested": f"https://interlock.example/approvals/{approval['id']}",
        "approval.resolved": f"https://interlock.example/approvals/{approval['id']}",
        "run.completed": f"https://interlock.example/runs/{run_id}",
    }


async def test_a_workers_ended_runs_are_told_of_in_the_same_commit(
    rig: Rig, stub: Stub, dispatcher: Dispatcher
) -> None:
    @rig.tool("t.one")
    async def one() -> dict[str, str]:
        return {"x": "the-secret-output"}

    @rig.tool("t.two")
    async def two() -> None:
        raise Terminal("no")

    made = await hooked(rig, f"{stub.url}/in", events=["run.completed"])
    await rig.apply(QUICK)
    await rig.apply("name: f\nsteps: [{id: one, tool: t.two, input: {}}]")
    good, bad = await rig.start("q", {}), await rig.start("f", {})
    async with rig.worker():
        await rig.until(good, "succeeded")
        await rig.until(bad, "failed")
    assert len(await rig.sql("SELECT * FROM interlock.outbox_message")) == 2
    await dispatcher.deliver_due()
    said = [Webhook(made["secret"]).verify(r.body, r.headers)["data"] for r in stub.at("/in")]
    assert {(s["run_id"], s["status"]) for s in said} == {(str(good), "succeeded"), (str(bad), "failed")}
    assert b"the-secret-output" not in b"".join(r.body for r in stub.received)


async def test_others_are_told_nothing(rig: Rig, stub: Stub, dispatcher: Dispatcher) -> None:
    """Receivers of another tenant, another workspace or another event get no message."""
    other = await rig.tenant("other")
    await hooked(rig, f"{stub.url}/default")
    scoped = rig.http(await rig.key("w", "admin", workspace_id="w1"))
    assert (await scoped.post("/api/webhooks", json={"url": f"{stub.url}/w1"})).status_code == 201
    await rig.apply(GATE, other)
    await rig.start("a", {"who": "x"}, other)
    assert await rig.sql("SELECT * FROM interlock.outbox_message") == []
    await rig.apply(GATE)
    await rig.start("a", {"who": "x"})
    await dispatcher.deliver_due()
    assert (len(stub.at("/default")), len(stub.at("/w1"))) == (1, 0)
    assert len((await scoped.get("/api/webhooks")).json()["items"]) == 1
    (mine,) = [w for w in (await rig.http().get("/api/webhooks")).json()["items"] if w["url"].endswith("/default")]
    assert (await scoped.delete(f"/api/webhooks/{mine['id']}")).status_code == 404


async def test_the_id_stays_the_same_over_all_tries(rig: Rig, stub: Stub, dispatcher: Dispatcher) -> None:
    rig.clock.freeze()
    made = await hooked(rig, f"{stub.url}/in", events=["approval.requested"])
    stub.script(
        "/in", (500, {}, {}), (302, {"location": f"{stub.url}/trap"}, {}), (429, {"retry-after": "7"}, {}),
        (204, {}, {}),
    )  # fmt: skip
    await rig.apply(GATE)
    await rig.start("a", {"who": "x"})
    errors = []
    for pause in (0, 5, 30, 7):
        rig.clock.advance(pause - 0.5 if pause else 0)
        assert not pause or await dispatcher.deliver_due() == 0
        rig.clock.advance(0.5 if pause else 0)
        assert await dispatcher.deliver_due() == 1
        (listed,) = (await rig.http().get(f"/api/webhooks/{made['id']}/deliveries")).json()["items"]
        errors.append((listed["status"], listed["attempts"], listed["response_status"], listed["last_error"]))
    assert errors == [
        ("pending", 1, 500, "answered 500"),
        ("pending", 2, 302, f"answered 302 to {stub.url}/trap; redirects are not followed"),
        ("pending", 3, 429, "answered 429"),
        ("delivered", 4, 204, None),
    ]
    assert {r.headers["webhook-id"] for r in stub.at("/in")} == {listed["id"]}
    assert stub.at("/trap") == []
    shown = (await rig.http().get(f"/api/webhooks/{made['id']}")).json()
    assert (shown["failing_since"], shown["last_error"], "secret" in shown) == (None, None, False)


async def test_a_sender_that_dies_before_it_marks_sends_the_same_message_again(
    rig: Rig, stub: Stub, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.clock.freeze()
    await hooked(rig, f"{stub.url}/in", events=["approval.requested"])
    await rig.apply(GATE)
    await rig.start("a", {"who": "x"})

    async def die(*_: Any) -> float:
        raise asyncio.CancelledError

    dead = Dispatcher(rig.database, settings)
    with monkeypatch.context() as patch:
        patch.setattr(outbox, "settle", die)
        with pytest.raises(asyncio.CancelledError):
            await dead.deliver_due()
    await dead.close()
    rig.clock.advance(outbox.LEASE_SECONDS)
    restarted = Dispatcher(rig.database, settings)
    await restarted.deliver_due()
    await restarted.close()
    first, second = stub.at("/in")
    assert first.headers["webhook-id"] == second.headers["webhook-id"] and first.body == second.body


async def test_a_dead_receiver_holds_up_nobody_else(rig: Rig, stub: Stub, dispatcher: Dispatcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}/"
    dead = await hooked(rig, nobody, events=["approval.requested"])
    await hooked(rig, f"{stub.url}/in", events=["approval.requested"])
    await rig.apply(GATE)
    for _ in range(30):
        await rig.start("a", {"who": "x"})
    assert len(await outbox.claim(rig.database, ["webhook"], most=200)) == 16  # eight of each, in any order
    await rig.sql("UPDATE interlock.outbox_message SET due_at = created_at, attempts = 0")
    await dispatcher.deliver_due()
    assert len(stub.at("/in")) == 30
    shown = (await rig.http().get(f"/api/webhooks/{dead['id']}")).json()
    assert "ConnectError" in shown["last_error"] and shown["failing_since"]


async def test_a_receiver_that_fails_for_days_is_switched_off_and_says_why(
    rig: Rig, stub: Stub, dispatcher: Dispatcher
) -> None:
    rig.clock.freeze()
    made = await hooked(rig, f"{stub.url}/in", events=["approval.requested"])
    stub.default = lambda path: (500, {}, {})
    await rig.apply(GATE)
    for _ in range(6):
        await rig.start("a", {"who": "x"})
        await dispatcher.deliver_due()
        rig.clock.advance(86400)
    shown = (await rig.http().get(f"/api/webhooks/{made['id']}")).json()
    assert shown["disabled_at"] and shown["last_error"] == "answered 500"
    tried = len(stub.received)
    await rig.start("a", {"who": "x"})
    assert await dispatcher.deliver_due() == 0 and len(stub.received) == tried
    assert await rig.sql("SELECT * FROM interlock.outbox_message WHERE done_at IS NULL") == []
    assert (await rig.http().post(f"/api/webhooks/{made['id']}/enable")).json()["disabled_at"] is None
    stub.default = lambda path: (200, {}, {})
    await rig.start("a", {"who": "x"})
    assert await dispatcher.deliver_due() == 1


async def test_one_that_is_gone_is_switched_off_at_once(rig: Rig, stub: Stub, dispatcher: Dispatcher) -> None:
    made = await hooked(rig, f"{stub.url}/in")
    stub.script("/in", (410, {}, {}))
    await rig.apply(GATE)
    await rig.start("a", {"who": "x"})
    await dispatcher.deliver_due()
    assert (await rig.http().get(f"/api/webhooks/{made['id']}")).json()["disabled_at"]


async def test_a_removed_webhook_hears_nothing_more(rig: Rig, stub: Stub, dispatcher: Dispatcher) -> None:
    made = await hooked(rig, f"{stub.url}/in")
    await rig.apply(GATE)
    await rig.start("a", {"who": "x"})
    assert (await rig.http().delete(f"/api/webhooks/{made['id']}")).status_code == 200
    await rig.start("a", {"who": "x"})
    assert await dispatcher.deliver_due() == 0
    assert (await rig.http().get("/api/webhooks")).json()["items"] == []
    assert (await rig.http().get(f"/api/webhooks/{made['id']}")).status_code == 404


async def test_a_receiver_has_limited_time(rig: Rig, stub: Stub, settings: Settings) -> None:
    settings.webhook_timeout_seconds = 0.1
    dispatcher = Dispatcher(rig.database, settings)
    stub.hold = asyncio.Event()
    made = await hooked(rig, f"{stub.url}/in")
    await rig.apply(GATE)
    await rig.start("a", {"who": "x"})
    await dispatcher.deliver_due()
    stub.hold.set()
    await dispatcher.close()
    assert "no answer" in (await rig.http().get(f"/api/webhooks/{made['id']}")).json()["last_error"]


async def test_only_admins_manage_webhooks(rig: Rig, stub: Stub) -> None:
    for role in ("viewer", "operator", "approver", "agent"):
        http = rig.http(await rig.key(role, role))
        assert (await http.post("/api/webhooks", json={"url": f"{stub.url}/in"})).status_code == 403
        assert (await http.get("/api/webhooks")).status_code == 403


async def test_deliveries_come_in_pages(rig: Rig, stub: Stub) -> None:
    made = await hooked(rig, f"{stub.url}/in", events=["approval.requested"])
    await rig.apply(GATE)
    for _ in range(3):
        await rig.start("a", {"who": "x"})
    first = (await rig.http().get(f"/api/webhooks/{made['id']}/deliveries?limit=2")).json()
    cursor = first["next_cursor"]
    second = (await rig.http().get(f"/api/webhooks/{made['id']}/deliveries?limit=2&cursor={cursor}")).json()
    assert (len(first["items"]), len(second["items"]), second["next_cursor"]) == (2, 1, None)
    assert len({d["id"] for d in first["items"] + second["items"]}) == 3
    assert (await rig.http().get(f"/api/webhooks/{made['id']}/deliveries?cursor=eA")).status_code == 422


# ---------------------------------------------------------------- permitted addresses

PRIVATE = [
    "http://127.0.0.1/", "http://127.1/", "http://2130706433/", "http://0.0.0.0/", "http://10.1.2.3/",
    "http://172.16.0.1/", "http://192.168.1.1:8080/x", "http://169.254.169.254/latest/meta-data", "http://100.64.0.1/",
    "http://224.0.0.1/", "http://255.255.255.255/", "http://[::1]/", "http://[::]/", "http://[fe80::1]/",
    "http://[fc00::1]/", "http://[ff02::1]/", "http://[::ffff:10.0.0.1]/", "http://[::ffff:169.254.169.254]/",
    "http://[64:ff9b::7f00:1]/", "http://[2002:7f00:1::]/", "http://localhost/",
    # Security L8: relays of 6to4, documentation, and addresses that the internet does not route.
    "http://192.88.99.1/", "http://[3fff::1]/", "http://[5f00::1]/", "http://[64:ff9b:1::1]/", "http://[fec0::1]/",
]  # fmt: skip
OTHERS = [
    "ftp://example.com/", "file:///etc/passwd", "https:///x", "https://u:p@example.com/", "gopher://x", "x",
    "http://[::1", "http://example.com:99999/", "http://example.com:0/",
]  # fmt: skip


async def test_private_addresses_are_refused(rig: Rig, settings: Settings) -> None:
    settings.webhook_allow_private = False
    for place in PRIVATE:
        answer = await rig.http().post("/api/webhooks", json={"url": place})
        assert (answer.status_code, answer.json()["code"]) == (422, "WEBHOOK_URL_REFUSED"), place


async def test_other_urls_are_refused(rig: Rig) -> None:
    for other in OTHERS:
        assert (await rig.http().post("/api/webhooks", json={"url": other})).status_code == 422, other


def resolving(monkeypatch: pytest.MonkeyPatch, names: dict[str, list[str]]) -> None:
    """Resolve names as the test says; pass everything else on."""
    loop, real = asyncio.get_running_loop(), asyncio.get_running_loop().getaddrinfo

    async def lookup(host: Any, port: Any, **options: Any) -> Any:
        if host not in names:
            return await real(host, port, **options)
        if not names[host]:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in names[host]]

    monkeypatch.setattr(loop, "getaddrinfo", lookup)


async def test_a_name_with_a_private_address_is_refused(
    rig: Rig, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.webhook_allow_private = False
    """Security L7: it answers like a name that nobody knows, or tenants could map the network by its names."""
    there = {"inside.example": ["10.0.0.7"], "both.example": ["93.184.216.34", "127.0.0.1"], "nobody.example": []}
    resolving(monkeypatch, there)
    told = set()
    for name in there:
        answer = await rig.http().post("/api/webhooks", json={"url": f"https://{name}/"})
        assert (answer.status_code, answer.json()["code"]) == (422, "WEBHOOK_URL_REFUSED")
        told.add(answer.text.replace(name, ""))
    assert len(told) == 1 and "has no public address" in told.pop()


async def test_a_name_that_becomes_private_later_is_not_called(
    rig: Rig, stub: Stub, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.webhook_allow_private = False
    port = stub.url.rpartition(":")[2]
    names = {"rebind.example": ["93.184.216.34"], "later.example": ["93.184.216.34"]}
    resolving(monkeypatch, names)
    made = await hooked(rig, f"http://rebind.example:{port}/in")
    late = await hooked(rig, f"http://later.example:{port}/in")
    names |= {"rebind.example": ["127.0.0.1"], "later.example": []}
    await rig.apply(GATE)
    await rig.start("a", {"who": "x"})
    dispatcher = Dispatcher(rig.database, settings)
    await dispatcher.deliver_due()
    await dispatcher.close()
    assert stub.received == []
    for webhook, name in ((made, "rebind"), (late, "later")):
        told = (await rig.http().get(f"/api/webhooks/{webhook['id']}")).json()["last_error"]
        assert told.startswith(f"{name}.example has no public address.") and "127.0.0.1" not in told


async def test_the_connection_goes_to_the_address_that_was_checked(
    rig: Rig, stub: Stub, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine resolves the name once. A second look-up by the HTTP client could get another answer."""
    port = stub.url.rpartition(":")[2]
    looked_up: list[str] = []

    async def lookup(host: Any, port: Any, **_: Any) -> Any:
        looked_up.append(str(host))
        assert host == "hooks.example", "only names are looked up"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    await hooked(rig, f"http://hooks.example:{port}/in?a=b")
    real = url_guard.resolve

    async def resolve(url: str, *, allow_private: bool) -> list[str]:
        with monkeypatch.context() as patch:
            patch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
            return await real(url, allow_private=allow_private)

    monkeypatch.setattr(url_guard, "resolve", resolve)
    await rig.apply(GATE)
    await rig.start("a", {"who": "x"})
    await dispatcher.deliver_due()
    (request,) = stub.at("/in")
    assert request.headers["host"] == f"hooks.example:{port}"
    assert looked_up == ["hooks.example"]


# ---------------------------------------------------------------- its secret


async def tell(rig: Rig, dispatcher: Dispatcher) -> None:
    await rig.start("a", {"who": "x"})
    await dispatcher.deliver_due()


async def test_its_secret_stands_nowhere_in_the_clear(rig: Rig, stub: Stub, dispatcher: Dispatcher) -> None:
    answer = await rig.http().post(
        "/api/webhooks", json={"url": f"{stub.url}/in"}, headers={"Idempotency-Key": "again"}
    )
    secret = answer.json()["secret"]
    again = await rig.http().post("/api/webhooks", json={"url": f"{stub.url}/in"}, headers={"Idempotency-Key": "again"})
    shown = (await rig.http().get(f"/api/webhooks/{answer.json()['id']}")).text
    listed = (await rig.http().get("/api/webhooks")).text
    # Neither the text nor the bytes it encodes, in any column of any row.
    raw = secret.removeprefix("whsec_")
    tables = await rig.sql("SELECT tablename FROM pg_tables WHERE schemaname = 'interlock'")
    rows = [
        str(row[0]) for t in tables for row in await rig.sql(f"SELECT x::text FROM interlock.{t['tablename']} AS x")
    ]
    assert rows and all(raw not in text for text in [*rows, again.text, shown, listed])
    with pytest.raises(asyncpg.CheckViolationError, match="notification_target_secret"):
        await rig.sql("UPDATE interlock.notification_target SET nonce = NULL, ciphertext = NULL")


async def test_a_new_key_keeps_every_secret(rig: Rig, stub: Stub, dispatcher: Dispatcher) -> None:
    made = await hooked(rig, f"{stub.url}/in", events=["approval.requested"])
    await rig.http().put("/api/secrets/stripe", json={"value": "the-value-of-stripe", "tools": ["*"]})
    await rig.apply(GATE)
    key = SecretsKey(rig.settings)
    (before,) = key.read()
    key.rotate()
    await tell(rig, dispatcher)  # signed with the old key too, after the new one
    assert await encryption.encrypt_anew(rig.database) == 2
    new, _ = key.read()
    (rig.settings.data_dir / "secrets.key").write_text(base64.b64encode(new).decode())
    await tell(rig, dispatcher)  # signed with the new key alone
    assert new != before and len(stub.at("/in")) == 2
    for received in stub.at("/in"):
        Webhook(made["secret"]).verify(received.body, received.headers)
    opened = await Secrets(rig.database).open(rig.admin.tenant_id, ["stripe"], Use(None))
    assert opened.values == {"stripe": "the-value-of-stripe"}


async def test_without_its_key_nothing_is_sent_and_it_says_why(rig: Rig, stub: Stub, dispatcher: Dispatcher) -> None:
    made = await hooked(rig, f"{stub.url}/in", events=["approval.requested"])
    await rig.apply(GATE)
    (rig.settings.data_dir / "secrets.key").write_text(base64.b64encode(b"k" * 32).decode())
    await tell(rig, dispatcher)
    (delivery,) = (await rig.http().get(f"/api/webhooks/{made['id']}/deliveries")).json()["items"]
    assert (stub.received, delivery["status"]) == ([], "pending")
    assert delivery["last_error"].startswith("its secret was encrypted with another key")
    with pytest.raises(Conflict, match="another key") as refused:
        await encryption.encrypt_anew(rig.database)
    assert refused.value.code == "SECRETS_KEY_INVALID"


async def test_a_secret_moved_to_another_webhook_does_not_open(rig: Rig, stub: Stub, dispatcher: Dispatcher) -> None:
    await hooked(rig, f"{stub.url}/one", events=["approval.requested"])
    await hooked(rig, f"{stub.url}/two", events=["approval.requested"])
    await rig.apply(GATE)
    await rig.sql(
        "UPDATE interlock.notification_target SET nonce = o.nonce, ciphertext = o.ciphertext"
        " FROM interlock.notification_target AS o"
        " WHERE o.address LIKE '%/one' AND notification_target.address LIKE '%/two'"
    )
    await tell(rig, dispatcher)
    assert (len(stub.at("/one")), len(stub.at("/two"))) == (1, 0)


# ---------------------------------------------------------------- test messages


async def test_a_test_message_is_sent_like_any_other(rig: Rig, stub: Stub, dispatcher: Dispatcher) -> None:
    made = await hooked(rig, f"{stub.url}/in", events=["run.completed"])
    await hooked(rig, f"{stub.url}/other")
    sent = await rig.http().post(f"/api/webhooks/{made['id']}/test")
    assert (sent.status_code, sent.json()["status"], sent.json()["attempts"]) == (202, "pending", 0)
    await dispatcher.deliver_due()
    (received,) = stub.received
    said = Webhook(made["secret"]).verify(received.body, received.headers)
    assert (received.path, said["type"], said["data"]) == ("/in", "webhook.test", {"webhook_id": made["id"]})
    (delivery,) = (await rig.http().get(f"/api/webhooks/{made['id']}/deliveries")).json()["items"]
    assert (delivery["id"], delivery["status"]) == (sent.json()["id"], "delivered")


async def test_one_that_is_off_or_anothers_is_not_tested(rig: Rig, stub: Stub) -> None:
    made = await hooked(rig, f"{stub.url}/in")
    await rig.sql("UPDATE interlock.notification_target SET disabled_at = now()")
    refused = await rig.http().post(f"/api/webhooks/{made['id']}/test")
    assert (refused.status_code, refused.json()["code"]) == (409, "WEBHOOK_DISABLED")
    other = rig.http(await rig.key("a", "admin", tenant_id=(await rig.tenant("other")).tenant_id))
    assert (await other.post(f"/api/webhooks/{made['id']}/test")).status_code == 404
    operator = rig.http(await rig.key("o", "operator"))
    assert (await operator.post(f"/api/webhooks/{made['id']}/test")).status_code == 403
    assert await rig.sql("SELECT FROM interlock.outbox_message") == []
