"""An agent with its own loop: OpenAI decides what to call, Interlock decides whether it is called.

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
    """Make one call through the gate. The model's call id makes a repeated call the same tool call."""
    made = interlock.tool_call(name.replace("__", "."), json.loads(arguments), idempotency_key=call_id)
    if made.approval_id:
        print(f"Waiting for approval. To continue, run: interlock approval approve {made.approval_id}", file=sys.stderr)
    while made.status in ("pending_approval", "running"):
        made = interlock.get_tool_call(made.id, wait=60)  # the server answers when the call has ended
    return json.dumps(made.result if made.status == "done" else {"error": made.error})


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
