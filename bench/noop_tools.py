"""The tool that does nothing but say when, for the workers of the benchmark; it counts its calls if asked to."""

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
