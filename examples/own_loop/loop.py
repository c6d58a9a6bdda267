"""An agent with a loop of its own: OpenAI decides what to call, Interlock decides whether it is called.

pip install interlock[openai]
INTERLOCK_API_KEY=… OPENAI_API_KEY=… python loop.py "refund charge ch_1044"
"""

import json
import sys
from typing import Any

from openai import OpenAI

from interlock import Client


def offer(interlock: Client) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name.replace(".", "__"), "description": tool.description, "parameters": tool.input_schema,
            },
        }
        for tool in interlock.tools().items
    ]  # fmt: skip


def call(interlock: Client, name: str, arguments: str, call_id: str) -> str:
    """One call through the gate. The model's own id of it makes the same call twice the same act."""
    act = interlock.act(name.replace("__", "."), json.loads(arguments), idempotency_key=call_id)
    while act.status in ("pending_approval", "running"):
        if act.approval_id:
            print(f"waiting for people: interlock approval approve {act.approval_id}", file=sys.stderr)
        act = interlock.acted(act.id, wait=60)
    return json.dumps(act.result if act.status == "done" else {"error": act.error})


def main(prompt: str, interlock: Client, openai: OpenAI, model: str = "gpt-5-mini") -> str:
    messages: list[Any] = [{"role": "user", "content": prompt}]
    tools: Any = offer(interlock)
    while True:
        said = openai.chat.completions.create(model=model, messages=messages, tools=tools).choices[0].message
        messages.append(said)
        if not said.tool_calls:
            return said.content or ""
        for asked in said.tool_calls:
            answer = call(interlock, asked.function.name, asked.function.arguments, asked.id)
            messages.append({"role": "tool", "tool_call_id": asked.id, "content": answer})


if __name__ == "__main__":
    with Client() as client:
        print(main(" ".join(sys.argv[1:]), client, OpenAI()))
