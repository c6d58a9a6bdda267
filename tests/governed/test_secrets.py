"""Secrets: tools get the values, and no other output contains them, however a run goes."""

import base64
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import pytest
import structlog
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel
from tests.governed.conftest import Shop
from tests.rig import Rig

from interlock import Context, Retryable, Secret, Terminal
from interlock.definition.workflow import parse
from interlock.engine.access.secrets import Secrets, Use
from interlock.engine.approvals import approvals
from interlock.errors import DefinitionInvalid
from interlock.store.pool import Tx
from interlock.telemetry import configure_logging

# Every encoding keeps the middle part recognizable.
NEEDLE = "pl4nted7w0rd"
VALUE = f"sk_live/+= äö\"'\\{NEEDLE}\\n$x"

PAY = """
name: pay
steps:
  - id: pay
    tool: bank.pay
    input: {amount: "${input.amount}", auth: "Bearer ${secrets.bank_key}", note: "${input.note}"}
    retry: {max_attempts: 2, backoff: [0s]}
"""

# A rule for bank.pay that requires one approval.
HOLDS = """
@id("reads") permit(principal, action in Action::"read", resource);
@id("pay") @decision("needs_approval") @tier("med") permit(principal, action == Action::"bank.pay", resource);
"""


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as captured:
        yield captured


@pytest.fixture
async def bank(rig: Rig) -> list[dict[str, Any]]:
    """A tool that takes a secret, and its calls."""
    called: list[dict[str, Any]] = []

    @rig.tool("bank.pay", writes=True, risk="low", idempotent=True, target="{auth}", show=["auth", "note"])
    async def pay(ctx: Context, amount: int, auth: str, note: str) -> dict[str, Any]:
        called.append({"amount": amount, "auth": auth, "note": note})
        secret = auth.removeprefix("Bearer ")
        ctx.log.info("paying", auth=auth, nested={"deep": [secret]}, odd=_Odd(secret))
        ctx.cost(0.5, provider=secret, **{secret: 3.0})
        if note == "fail":
            raise Terminal(f"401 for {auth}")
        if note == "retry":
            raise Retryable(f"503: {base64.b64encode(auth.encode()).decode()}")
        if note == "log":
            try:
                raise ValueError(secret)
            except ValueError:
                ctx.log.exception("went wrong")
        if note == "invalid":
            _Strict.model_validate({"number": secret * 3})
        return {"echo": auth, secret: "as a key", "list": [f"x{secret}y"]}

    await keep(rig, "bank_key", VALUE)
    await rig.apply(PAY)
    return called


class _Odd:
    def __init__(self, secret: str) -> None:
        self.secret = secret

    def __repr__(self) -> str:
        return f"Odd({self.secret})"


class _Strict(BaseModel):
    number: int


async def keep(rig: Rig, name: str, value: str) -> None:
    answer = await rig.http().put(
        f"/api/secrets/{name}", json={"value": value, "tools": ["*"]}, headers={"Idempotency-Key": f"set-{name}"}
    )
    assert answer.status_code == 200, answer.text
    assert value not in answer.text


async def everything(rig: Rig, lines: list[Any]) -> str:
    """Return every row of every table, every log line, every evidence file, and the API's view of them."""
    await rig.prove()
    found = [repr(lines)]
    tables = await rig.sql("SELECT table_name FROM information_schema.tables WHERE table_schema = 'interlock'")
    assert len(tables) > 40
    for table in tables:
        rows = await rig.sql(f"SELECT * FROM interlock.{table['table_name']}")
        found += [repr(dict(row)) for row in rows]
        found += [bytes(v).decode(errors="replace") for row in rows for v in dict(row).values() if isinstance(v, bytes)]
    for path in (rig.settings.data_dir / "artifacts").rglob("*"):
        found += list(_contents(path))
    http = rig.http()
    runs = [row["id"] for row in await rig.sql("SELECT id FROM interlock.run")]
    paths = ["/api/secrets", "/api/approvals", "/api/audit", "/api/runs"]
    paths += [f"/api/runs/{run}{part}" for run in runs for part in ("", "/events", "/receipts", "/evidence")]
    found += [(await http.get(path)).text for path in paths]
    return "\n".join(found)


def _contents(path: Path) -> Iterator[str]:
    if path.is_file():
        raw = path.read_bytes()
        yield raw.decode(errors="replace")
        for word in raw.decode(errors="replace").replace('"', " ").split():
            yield base64.b64decode(word + "==", validate=False).decode(errors="replace") if len(word) > 64 else ""


def traces(haystack: str, needle: str = NEEDLE) -> list[str]:
    """Return the places that contain the secret: in clear text, hexadecimal, or base64 at each of the three offsets."""
    raw = needle.encode()
    inside = [base64.b64encode(bytes(at) + raw)[4 if at else 0 : -4].decode() for at in range(3)]
    return [form for form in (needle, raw.hex(), *inside) if form in haystack]


async def test_the_search_finds_a_secret_that_is_not_kept_apart(rig: Rig, lines: list[Any]) -> None:
    @rig.tool("leaky.echo")
    async def echo(text: str) -> str:
        return text

    await rig.apply("{name: leak, steps: [{id: a, tool: leaky.echo, input: {text: '${input.text}'}}]}")
    await rig.work_until(await rig.start("leak", {"text": VALUE}))
    text = await everything(rig, lines)
    assert traces(text) and text.count(NEEDLE) > 5
    assert traces(VALUE.encode().hex())
    assert all(traces(base64.b64encode(f"{before}{VALUE}".encode()).decode()) for before in ("", "a", "bc"))


@pytest.mark.parametrize("note", ["fine", "fail", "retry", "log", "invalid"])
async def test_a_planted_secret_is_found_nowhere(
    rig: Rig, bank: list[dict[str, Any]], lines: list[Any], note: str
) -> None:
    run_id = await rig.start("pay", {"amount": 5, "note": note})
    run = await rig.work_until(run_id)
    assert run["status"] == ("succeeded" if note in ("fine", "log") else "failed"), run
    assert {call["auth"] for call in bank} == {f"Bearer {VALUE}"}
    assert len(bank) == (2 if note == "retry" else 1)
    text = await everything(rig, lines)
    assert traces(text) == []
    assert "Bearer ${secrets.bank_key}" in text and "[secret]" in text
    assert any(line["event"] == "paying" for line in lines)
    if note == "fine":
        assert run["result"] == {"echo": "Bearer [secret]", "[secret]": "as a key", "list": ["x[secret]y"]}
    if note == "fail":
        assert run["error"]["message"] == "401 for Bearer [secret]"


@pytest.mark.parametrize("note", ["fine", "fail", "retry", "invalid"])
async def test_a_planted_secret_is_in_no_trace(
    rig: Rig, bank: list[dict[str, Any]], exported: InMemorySpanExporter, note: str
) -> None:
    run = await rig.work_until(await rig.start("pay", {"amount": 5, "note": note}))
    sent = {span.name: span for span in exported.get_finished_spans()}
    assert {"run pay", "step pay", "tool bank.pay"} <= set(sent) and bank
    assert traces("\n".join(span.to_json() for span in sent.values())) == []
    assert sent["tool bank.pay"].status.is_ok == (run["status"] == "succeeded")
    if note == "fail":
        assert sent["tool bank.pay"].status.description == "401 for Bearer [secret]"


async def test_people_approve_and_edit_what_names_a_secret(
    rig: Rig, bank: list[dict[str, Any]], lines: list[Any]
) -> None:
    await rig.sql("SELECT 1")
    await _publish(rig, HOLDS)
    run_id = await rig.start("pay", {"amount": 5, "note": "please"})
    await rig.work_until(run_id, "waiting_approval")
    one, two = await rig.person("one", "approver"), await rig.person("two", "approver")
    (asked,) = (await rig.http().get("/api/approvals?status=requested")).json()["items"]
    assert asked["action"]["fields"]["auth"] == asked["action"]["target"] == "Bearer ${secrets.bank_key}"
    assert asked["action"]["secrets"] == {"auth": ["bank_key"]}

    async def edit(tx: Tx) -> Any:
        return await approvals.edit(tx, rig.plans, rig.services.policies, one, UUID(asked["id"]), patch={"amount": 3})

    await rig.database.run_in_transaction(edit)
    await rig.decide(run_id, approves=True, who=two)
    run = await rig.work_until(run_id)
    assert run["status"] == "succeeded", run
    assert bank == [{"amount": 3, "auth": f"Bearer {VALUE}", "note": "please"}]
    assert traces(await everything(rig, lines)) == []


async def test_what_an_approver_writes_is_text_and_no_secret(rig: Rig, bank: list[dict[str, Any]]) -> None:
    await _publish(rig, HOLDS)
    run_id = await rig.start("pay", {"amount": 5, "note": "please"})
    await rig.work_until(run_id, "waiting_approval")
    one, two = await rig.person("one", "approver"), await rig.person("two", "approver")
    (asked,) = (await rig.http().get("/api/approvals?status=requested")).json()["items"]
    patch = {"auth": "${secrets.bank_key}", "note": "${secrets.bank_key}"}

    async def edit(tx: Tx) -> Any:
        return await approvals.edit(tx, rig.plans, rig.services.policies, one, UUID(asked["id"]), patch=patch)

    await rig.database.run_in_transaction(edit)
    await rig.decide(run_id, approves=True, who=two)
    assert (await rig.work_until(run_id))["status"] == "succeeded"
    assert bank == [{"amount": 5, **patch}]


@pytest.mark.parametrize("forged", ["${secrets.bank_key}", "$${secrets.bank_key}", "[secret]", "secrets.bank_key"])
async def test_a_text_that_looks_like_a_secret_stays_text(rig: Rig, bank: list[dict[str, Any]], forged: str) -> None:
    run_id = await rig.start("pay", {"amount": 1, "note": forged})
    assert (await rig.work_until(run_id))["status"] == "succeeded"
    assert bank[0]["note"] == forged


async def test_an_action_that_names_a_secret_is_another_than_one_that_spells_it(rig: Rig) -> None:
    digests = []

    @rig.tool("a.b", writes=True, risk="low", idempotent=True)
    async def do(text: str) -> None: ...

    await keep(rig, "x_key", VALUE)
    for name, text in (("real", "${secrets.x_key}"), ("spelt", "$${secrets.x_key}"), ("real2", "${ secrets.x_key }")):
        await rig.apply(f"{{name: {name}, steps: [{{id: a, tool: a.b, input: {{text: '{text}'}}}}]}}")
        await rig.work_until(await rig.start(name))
    digests = [row["action_digest"] for row in await rig.sql("SELECT action_digest FROM interlock.receipt ORDER BY id")]
    assert digests[0] == digests[2] != digests[1]


async def test_an_unknown_secret_fails_the_step_by_its_name(rig: Rig, bank: list[dict[str, Any]]) -> None:
    assert (await rig.http().delete("/api/secrets/bank_key")).status_code == 200
    run = await rig.work_until(await rig.start("pay", {"amount": 1, "note": ""}))
    assert (run["status"], run["reason"]) == ("failed", "terminal_error")
    assert run["error"]["message"].startswith("There is no secret bank_key. Set it with `interlock secret set")
    assert bank == []
    assert [r["status"] for r in await rig.sql("SELECT status FROM interlock.receipt")] == ["failed"]


async def test_what_libraries_log_meanwhile_is_scrubbed_too(
    rig: Rig, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def chat(key: str) -> None:
        structlog.get_logger().warning("plain", key=key)
        try:
            raise ValueError(key)
        except ValueError:
            logging.getLogger("some.library").exception("GET https://x?key=%s", key)

    @rig.tool("lib.threaded")
    def threaded(key: str) -> None:
        chat(key)

    @rig.tool("lib.awaited")
    async def awaited(key: str) -> None:
        chat(key)

    await keep(rig, "k_key", VALUE)
    steps = [{"id": t, "tool": f"lib.{t}", "input": {"key": "${secrets.k_key}"}} for t in ("threaded", "awaited")]
    await rig.apply(json.dumps({"name": "chat", "steps": steps}))
    before, factory = structlog.get_config(), logging.getLogRecordFactory()
    try:
        configure_logging("info", "json")
        structlog.configure(cache_logger_on_first_use=False)  # other tests want their own
        run = await rig.work_until(await rig.start("chat"))
    finally:
        structlog.configure(**before)
        logging.setLogRecordFactory(factory)
    said = capfd.readouterr().err + caplog.text
    assert run["status"] == "succeeded" and said.count("[secret]") >= 6
    assert traces(said) == []


async def test_the_environment_is_for_the_default_tenant(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, lines: list[Any]
) -> None:
    monkeypatch.setenv("INTERLOCK_SECRET_BANK_KEY", VALUE)
    seen: list[str] = []

    @rig.tool("bank.look")
    async def look(key: str) -> str:
        seen.append(key)
        return key

    source = "{name: look, steps: [{id: a, tool: bank.look, input: {key: '${secrets.bank_key}'}}]}"
    other = await rig.tenant("acme")
    for who in (None, other):
        await rig.apply(source, who)
    assert (await rig.work_until(await rig.start("look")))["result"] == "[secret]"
    run = await rig.work_until(await rig.start("look", who=other))
    assert run["error"]["message"].startswith("There is no secret bank_key.")
    assert seen == [VALUE]
    assert traces(await everything(rig, lines)) == []


async def test_a_stored_secret_is_its_tenants_own_and_opens_nowhere_else(rig: Rig) -> None:
    await keep(rig, "bank_key", VALUE)
    other = await rig.tenant("acme")
    opened = await Secrets(rig.database).open(rig.admin.tenant_id, ["bank_key"], Use(None))
    assert opened.values == {"bank_key": VALUE} and VALUE not in repr(opened)
    columns = "name, version, nonce, ciphertext, tools, workspaces, created_at, created_by"
    await rig.sql(
        f"INSERT INTO interlock.secret (tenant_id, {columns}) SELECT $1, {columns} FROM interlock.secret",
        other.tenant_id,
    )
    with pytest.raises(Terminal, match="bank_key was encrypted with another key"):
        await Secrets(rig.database).open(other.tenant_id, ["bank_key"], Use(None))
    key = rig.settings.data_dir / "secrets.key"
    assert key.stat().st_mode & 0o777 == 0o600
    key.unlink()
    with pytest.raises(Terminal, match="bank_key cannot be opened here"):
        await Secrets(rig.database).open(rig.admin.tenant_id, ["bank_key"], Use(None))


async def test_secrets_are_written_listed_and_deleted_by_admins_and_never_read(rig: Rig) -> None:
    http = rig.http()
    for value, version in ((VALUE, 1), (VALUE + "2", 2)):
        answer = await http.put("/api/secrets/bank_key", json={"value": value, "tools": ["*"]})
        assert (answer.status_code, answer.json()["version"]) == (200, version)
    assert [s["name"] for s in (await http.get("/api/secrets")).json()["items"]] == ["bank_key"]
    assert (await http.get("/api/secrets/bank_key")).status_code == 405
    operator = rig.http(await rig.key("op", "operator"))
    for call in (operator.get("/api/secrets"), operator.put("/api/secrets/x", json={"value": VALUE, "tools": ["*"]})):
        assert (await call).status_code == 403
    for name, value in (("Bad-Name", VALUE), ("ok", "abc"), ("ok", 5), ("ok", "x" * 70_000)):
        refused = await http.put(f"/api/secrets/{name}", json={"value": value, "tools": ["*"]})
        assert refused.status_code == 422, refused.text
        assert value == 5 or str(value) not in refused.text
    assert (await http.delete("/api/secrets/bank_key")).json()["version"] == 2
    assert (await http.delete("/api/secrets/bank_key")).status_code == 404


@pytest.mark.parametrize(
    ("step", "says"),
    [
        ("{id: a, tool: t.t, when: 'secrets.x == \"y\"'}", "only go into the input of a tool"),
        ("{id: a, approval: {summary: 'use ${secrets.x}'}}", "only go into the input of a tool"),
        ("{id: a, wait: {duration: '${secrets.x}'}}", "only go into the input of a tool"),
        ("{id: a, tool: t.t, input: {k: '${secrets[input.n]}'}}", "a secret stands for itself"),
        ("{id: a, tool: t.t, input: {k: '${\"Bearer \" + secrets.x}'}}", "a secret stands for itself"),
        ("{id: a, tool: t.t, input: {k: '${secrets.x.y}'}}", "a secret stands for itself"),
        ("{id: a, tool: t.t, input: {k: '${size(secrets.x)}'}}", "a secret stands for itself"),
        ("{id: a, tool: t.t, input: {k: '${secrets}'}}", "a secret stands for itself"),
        ("{id: a, tool: t.t, input: {k: '${secrets.Bad}'}}", "no name of a secret"),
    ],
)
def test_a_secret_anywhere_else_is_a_fault(step: str, says: str) -> None:
    with pytest.raises(DefinitionInvalid, match=says):
        parse(f"{{name: w, steps: [{step}]}}")


@pytest.mark.parametrize(
    "how", ["", ", compensate: {tool: bank.close, input: {account: '${output.account}', key: '${secrets.bank_key}'}}"]
)
async def test_an_undo_asks_for_the_same_secret_by_name(how: str, shop: Shop, rig: Rig, lines: list[Any]) -> None:
    undone: list[tuple[str, str]] = []

    @rig.tool("bank.open", writes=True, risk="low", idempotent=True, undo="bank.close")
    async def open_account(owner: str, key: str) -> dict[str, str]:
        return {"account": "acc-1"}

    @rig.tool("bank.close", writes=True, risk="low", idempotent=True)
    async def close(account: str, key: str) -> None:
        undone.append((account, key))

    await keep(rig, "bank_key", VALUE)
    given = "{owner: ada, key: '${secrets.bank_key}'}"
    await rig.apply(f"{{name: open, steps: [{{id: a, tool: bank.open, input: {given}{how}}}]}}")
    run_id = await rig.start("open")
    await rig.work_until(run_id)
    (receipt,) = await shop.receipts(run_id)
    status, undo = await shop.admin.post(f"/api/receipts/{receipt['id']}/reverse")
    assert (status, undo["input"]) == (201, {"account": "acc-1"}), undo
    assert (await shop.ended(UUID(undo["id"])))["status"] == "succeeded"
    assert undone == [("acc-1", VALUE)]
    assert traces(await everything(rig, lines)) == []


# ---------------------------------------------------------------- secret arguments


class Login(BaseModel):
    token: Annotated[str, Secret]
    user: str


@pytest.fixture
async def login(rig: Rig) -> list[Any]:
    called: list[Any] = []
    rig.notary.salts.make()

    @rig.tool(
        "bank.login",
        writes=True,
        risk="low",
        idempotent=True,
        target="{user} {pin}",
        key="login:{user}:{pin}:{fields_hash}",
    )
    async def login(ctx: Context, user: str, pin: Annotated[int, Secret], fails: bool = False) -> Login:
        called.append(pin)
        ctx.log.info("with", pin=pin)
        if fails:
            raise Terminal(f"wrong pin {pin}")
        return Login(token=VALUE, user=f"{user} {VALUE}")

    @rig.tool("bank.whole")
    async def whole(of: Any) -> Annotated[dict[str, str], Secret]:
        called.append(of)
        return {"token": VALUE}

    await rig.apply(
        "{name: login, steps: [{id: a, tool: bank.login, "
        "input: {user: '${input.user}', pin: '${secrets.pin}', fails: '${input.fails}'}},"
        " {id: b, tool: bank.whole, input: {of: '${steps.a.output}'}}]}"
    )
    return called


async def test_what_a_tool_calls_secret_is_kept_apart(rig: Rig, login: list[Any], lines: list[Any]) -> None:
    await keep(rig, "pin", "7351926488071234")
    run = await rig.work_until(await rig.start("login", {"user": "ada", "fails": False}))
    assert run["step"]["a"]["last_error"]["message"].startswith("input of bank.login is not valid: pin:")
    # A secret is text; if a tool requires a number, the error does not contain the text.
    assert traces(await everything(rig, lines), "7351926488071234") == []


async def test_secret_parameters_differ_by_a_keyed_hash_and_results_are_hidden(
    rig: Rig, login: list[Any], lines: list[Any]
) -> None:
    await rig.apply(
        "{name: pins, steps: [{id: a, tool: bank.login, "
        "input: {user: ada, pin: '${input.parts[0] * 10000 + input.parts[1]}', fails: '${input.fails}'}},"
        " {id: b, tool: bank.whole, input: {of: '${steps.a.output}'}}]}"
    )
    first = await rig.work_until(await rig.start("pins", {"parts": [7351, 9264], "fails": False}))
    assert first["status"] == "succeeded", first
    assert first["step"]["a"]["output"] == {"token": "[secret]", "user": "ada [secret]"}
    assert login == [73519264, {"token": "[secret]", "user": "ada [secret]"}]
    assert first["result"] == "[secret]"
    second = await rig.work_until(await rig.start("pins", {"parts": [7351, 9265], "fails": True}))
    assert second["error"]["message"] == "wrong pin [secret]"
    receipts = await rig.sql("SELECT action_digest, idempotency_key FROM interlock.receipt ORDER BY id")
    assert receipts[0]["action_digest"] != receipts[1]["action_digest"]
    assert receipts[0]["idempotency_key"].startswith("login:ada:[secret] ")
    text = await everything(rig, lines)
    assert traces(text) == [] and "73519264" not in text and "73519265" not in text


async def test_a_result_that_is_not_what_was_declared_is_hidden_whole(rig: Rig, lines: list[Any]) -> None:
    @rig.tool("bank.odd")
    async def odd() -> Login:
        return {"tok": VALUE}  # type: ignore[return-value]

    await rig.apply("{name: odd, steps: [{id: a, tool: bank.odd}]}")
    run = await rig.work_until(await rig.start("odd"))
    assert run["result"] == "[secret]"
    assert traces(await everything(rig, lines)) == []


async def test_a_secret_parameter_cannot_be_edited_but_what_is_beside_it_can(rig: Rig, login: list[Any]) -> None:
    await _publish(rig, HOLDS.replace("bank.pay", "bank.login"))
    await rig.apply("{name: one, steps: [{id: a, tool: bank.login, input: {user: ada, pin: 73519264}}]}")
    run_id = await rig.start("one")
    await rig.work_until(run_id, "waiting_approval")
    (asked,) = (await rig.http().get("/api/approvals?status=requested")).json()["items"]
    assert asked["action"]["fields"]["pin"].startswith("[secret] ")
    one, two = await rig.person("one", "approver"), await rig.person("two", "approver")
    http = rig.http(await rig.key("ed", "approver"))
    refused = await http.post(f"/api/approvals/{asked['id']}/approve", json={"patch": {"pin": 1}})
    assert (refused.status_code, refused.json()["code"]) == (422, "SECRET_PARAMETER")

    async def edit(tx: Tx) -> Any:
        return await approvals.edit(tx, rig.plans, rig.services.policies, one, UUID(asked["id"]), patch={"user": "bob"})

    await rig.database.run_in_transaction(edit)
    await rig.decide(run_id, approves=True, who=two)
    run = await rig.work_until(run_id)
    assert run["status"] == "succeeded" and login == [73519264]
    assert run["result"]["user"] == "bob [secret]"


async def _publish(rig: Rig, text: str) -> None:
    from interlock.engine import policies
    from interlock.policy.policy import compile_policy

    policy = compile_policy(text, policies.facts(rig.tools))
    await rig.database.run_in_transaction(lambda tx: policies.publish(tx, rig.admin, text, policy.digest))


def test_no_secret_of_whoever_runs_the_tests_is_used() -> None:
    assert not [name for name in os.environ if name.startswith("INTERLOCK_SECRET_")]
