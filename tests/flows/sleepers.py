"""A flow that sleeps, for a worker in a separate process."""

import os

from interlock import FlowContext
from interlock.tools import Registry, flow, registry


def stock(shelf: Registry) -> None:
    @flow("sleeper", version=1, register=shelf)
    async def sleeper(ctx: FlowContext) -> None:
        ctx.now()
        await ctx.sleep("30d")


if os.environ.get("SLEEPERS"):
    stock(registry)
