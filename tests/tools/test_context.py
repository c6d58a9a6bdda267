"""The context: a tool's information about its step, and the tool's reports."""

import math
from decimal import Decimal
from uuid import UUID

import orjson
import pytest

from interlock.tools import Canceled, Context, default_key


def context(**more: str) -> Context:
    return Context(run_id=UUID(int=1), tenant_id=UUID(int=2), step="pay", attempt=3, **more)


def test_a_tool_knows_its_run_its_step_and_its_attempt() -> None:
    about = context()
    assert (about.run_id, about.tenant_id, about.step, about.attempt) == (UUID(int=1), UUID(int=2), "pay", 3)
    assert about.log is not None


def test_the_key_is_the_tools_own_or_made_from_run_and_step() -> None:
    assert context(idempotency_key="pay:7").idempotency_key == "pay:7"
    assert context().idempotency_key == default_key(UUID(int=1), "pay") == f"interlock:{UUID(int=1)}:pay"


def test_costs_are_added_up_and_kept_apart_by_provider() -> None:
    about = context()
    assert (about.cost_usd, about.costs) == (0.0, None)
    about.cost(0.25, provider="openai", model="m", input_tokens=1200)
    about.cost(0)
    assert about.cost_usd == 0.25
    assert about.costs == [
        {"usd": 0.25, "provider": "openai", "model": "m", "input_tokens": 1200},
        {"usd": 0.0, "provider": None, "model": None},
    ]


@pytest.mark.parametrize("usd", [-0.01, math.nan, math.inf, -math.inf])
def test_a_cost_that_cannot_be_added_up_is_refused_where_it_is_reported(usd: float) -> None:
    about = context()
    with pytest.raises(ValueError, match="a cost is a number of at least 0"):
        about.cost(usd)
    with pytest.raises(ValueError, match="a cost is a number of at least 0"):
        about.cost(1, tokens=usd)
    assert (about.cost_usd, about.costs) == (0.0, None)


def test_what_a_price_list_calculates_with_becomes_what_the_journal_can_hold() -> None:
    about = context()
    about.cost(Decimal("0.1"), tokens=Decimal(3))  # type: ignore[arg-type]
    assert orjson.dumps(about.costs) == b'[{"usd":0.1,"provider":null,"model":null,"tokens":3.0}]'


def test_a_heartbeat_does_nothing_until_the_run_is_canceled() -> None:
    about = context()
    about.heartbeat()
    token = about.cancel_token()
    assert about.cancel_token() is token
    about.heartbeat()
    token.set()
    with pytest.raises(Canceled):
        about.heartbeat()


def test_being_canceled_is_not_swallowed_by_a_tool_that_catches_exceptions() -> None:
    assert not issubclass(Canceled, Exception)


def test_without_a_lease_and_a_time_out_nothing_ends() -> None:
    about = context()
    assert (about.remaining(), about.deadline, about.fencing_token) == (float("inf"), None, 1)
