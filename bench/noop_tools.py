"""Tools that do nothing, for the benchmark's workers: one reports the time and counts its calls, two are writes."""

import os
import time
from typing import Any

from bench.counter import Counter
from interlock import tool

_counter = Counter(os.environ["BENCH_COUNTER"]) if "BENCH_COUNTER" in os.environ else None


@tool("bench.noop")
async def noop() -> dict[str, Any]:
    if _counter is not None:
        _counter.add()
    return {"i": 0, "ok": True, "t": time.time()}


@tool("bench.read")
async def read(charge: str, amount: int) -> dict[str, Any]:
    return {"charge": charge, "amount": amount}


@tool("bench.write", writes=True, risk="low", idempotent=True)
async def write(charge: str, amount: int) -> dict[str, Any]:
    return {"charge": charge, "amount": amount}
