"""Evaluate expressions that are too expensive for an event loop: see `definition.expression.Elsewhere`."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from interlock.compute import Stopped, pool
from interlock.definition.expression import Elsewhere, StepAnswer, answer_to
from interlock.ids import TenantId
from interlock.journal import Journal, StepSnapshot

T = TypeVar("T")


async def answer(tenant_id: TenantId, asked: Iterable[Elsewhere]) -> None:
    """Evaluate the expressions in another process, under a time limit, and store the results in their scopes."""
    for each in asked:
        source, roots, steps = each.question()
        try:
            found = await pool.run(tenant_id, answer_to, source, roots, steps, must_wait=True)
        except Stopped as stopped:
            found = StepAnswer(why=stopped.detail)
        each.scope.answer(source, found)


async def with_answers(tenant_id: TenantId, work: Callable[[], T]) -> T:
    """Return what `work` returns. It is called again each time it needs an expensive expression."""
    while True:
        try:
            return work()
        except Elsewhere as asked:
            await answer(tenant_id, [asked])


async def here_or_elsewhere(tenant_id: TenantId, function: Callable[..., T], *args: Any) -> T:
    """Return what the function returns, evaluated here or, if it needs an expensive expression, in another process.

    The function takes `on_event_loop`, and its arguments can be pickled.
    """
    try:
        return function(*args, on_event_loop=True)
    except Elsewhere:
        return await pool.run(tenant_id, function, *args, must_wait=True)


async def input_of(journal: Journal, tenant_id: TenantId, fold: StepSnapshot) -> Any:
    """Return the input of a step. Raises ExpressionFailed."""
    return await with_answers(tenant_id, partial(fold.input, journal.scope_of(fold)))
