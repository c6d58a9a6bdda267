"""Schemathesis calls every operation of the API, with every role, from the API's description: no answer is a 5xx.

Requests go to a real server, over a socket. The test prints the number of cases, and each role gets an equal share
of the time.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis

from interlock.wire import Role
from tests.chaos.processes import Yard, workflow
from tests.rig import Rig

pytestmark = pytest.mark.chaos
SECONDS_PER_ROLE = 35.0
EXAMPLES = 8
# A stream that stays open, or `wait=`: a missing answer within this time is not a fault.
PATIENCE = 5.0
# The minimum number of cases per role, so that a run with hardly any cases fails.
LEAST_CASES = 500
QUIET = hypothesis.settings(
    max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)  # fmt: skip


class Attack:
    """The calls of all operations with one role."""

    def __init__(self, address: str, role: str, key: str) -> None:
        self.role = role
        self.answers: Counter[int] = Counter()
        self.operations: set[str] = set()
        self.faults: list[str] = []
        self._address = address
        self._session = requests.Session()
        self._headers = {"Authorization": f"Bearer {key}"}
        self._until = time.monotonic() + SECONDS_PER_ROLE

    def run(self, operations: list[Any]) -> None:
        """Call each operation once first, then repeat with more examples while there is time."""
        for examples in (1, EXAMPLES):
            for operation in operations:
                if time.monotonic() > self._until:
                    return
                self._run_one(operation, examples)

    def _run_one(self, operation: Any, examples: int) -> None:
        @hypothesis.settings(QUIET, max_examples=examples)
        @hypothesis.given(case=operation.as_strategy())
        def call(case: Any) -> None:
            self._call(operation.label, case)

        call()

    def _call(self, label: str, case: Any) -> None:
        given = case.as_transport_kwargs(base_url=self._address, headers=self._headers)
        try:
            with self._session.request(**given, timeout=PATIENCE, stream=True) as answer:
                status = answer.status_code
                if status >= 500:
                    self.faults.append(f"{self.role}: {label} answered {status}: {answer.text[:300]}; {given}"[:1500])
        except requests.Timeout:
            status = 0
        self.answers[status] += 1
        self.operations.add(label)


def operations_of(address: str) -> Iterator[Any]:
    raw = requests.get(f"{address}/api/openapi.json", timeout=10).json()
    for found in schemathesis.openapi.from_dict(raw).get_all_operations():
        yield found.ok()


async def test_no_role_gets_a_5xx_from_any_operation(rig: Rig, yard: Yard) -> None:
    await rig.apply(workflow("three", 3))
    yard.server(workers=1)
    address = await yard.address()
    operations = list(operations_of(address))
    attacks = []
    for role in Role:
        attack = Attack(address, role, await rig.key(f"{role} key", role))
        attack.run(operations)
        attacks.append(attack)
        print(f"{role}: {sum(attack.answers.values())} cases, {dict(sorted(attack.answers.items()))}")
    print(f"{sum(sum(attack.answers.values()) for attack in attacks)} cases of {len(operations)} operations in all")
    assert not [fault for attack in attacks for fault in attack.faults]
    for attack in attacks:
        assert attack.operations == {operation.label for operation in operations}, "there was no time for all of them"
        assert sum(attack.answers.values()) >= LEAST_CASES, f"{attack.role} was asked too little"
        assert attack.answers[200], f"{attack.role} was never let in"


class _Broken(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, body = (200, _DESCRIPTION) if self.path == "/api/openapi.json" else (500, b"{}")
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


_DESCRIPTION = json.dumps(
    {
        "openapi": "3.1.0", "info": {"title": "Broken", "version": "1"},
        "paths": {"/api/broken": {"get": {"responses": {"200": {"description": "Never."}}}}},
    }
).encode()  # fmt: skip


def test_a_server_that_answers_500_is_found_out() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Broken) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        attack = Attack(address, Role.VIEWER, "key")
        attack.run(list(operations_of(address)))
        server.shutdown()
    assert attack.faults[0].startswith("viewer: GET /api/broken answered 500: {}")
