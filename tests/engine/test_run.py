"""A run from start to end, in process."""

from tests.rig import Rig

LIST = """
name: list
steps:
  - {id: a, tool: t.echo, input: {value: "${input.x}"}}
  - {id: b, tool: t.echo, input: {value: "${steps.a.output}"}}
"""


async def test_a_run_executes_its_steps_in_order_and_succeeds(rig: Rig) -> None:
    seen = []

    @rig.tool("t.echo")
    async def echo(value: int) -> int:
        seen.append(value)
        return value + 1

    await rig.apply(LIST)
    run_id = await rig.start("list", {"x": 1})
    run = await rig.work_until(run_id)

    assert seen == [1, 2]
    assert (run["status"], run["reason"], run["result"]) == ("succeeded", "completed", 3)
    assert await rig.journal(run_id) == [
        "run:  -create-> pending",
        "run: pending -start-> running",
        "a: running -succeed-> succeeded",
        "b: running -succeed-> succeeded",
        "run: running -succeed-> succeeded",
    ]
