"""The documents' Python: code that defines tools and flows loads from a file unchanged."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs" / "guides" / f"{name}.md" for name in ("agents", "flows", "tools"))]
_PIECE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Load each one separately: guides reuse names.
_LOAD = """
import json, sys
from interlock.tools import load_tools, registry
found = []
for path in sys.argv[1:]:
    load_tools(path)
    found.append([[tool.name for tool in registry.all()], [flow.name for flow in registry.flows.all()]])
    registry._tools.clear()
    registry.flows = type(registry.flows)()
print(json.dumps(found))
"""


def test_what_defines_tools_and_flows_can_be_loaded(tmp_path: Path) -> None:
    pieces = [
        piece for page in PAGES for piece in _PIECE.findall(page.read_text()) if "@tool" in piece or "@flow" in piece
    ]
    paths = []
    for number, piece in enumerate(pieces):
        paths.append(tmp_path / f"piece_{number}.py")
        paths[-1].write_text(piece)
    loaded = subprocess.run(
        [sys.executable, "-c", _LOAD, *paths], cwd=ROOT, env=os.environ | {"OPENAI_API_KEY": "none"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert loaded.returncode == 0, loaded.stderr
    assert json.loads(loaded.stdout) == [
        [["shop.refund"], []],
        [["agent.function", "agent.operation"], ["support"]],
        [[], ["nightly"]],
        [[], ["nightly", "nightly"]],
        [["shop.refund"], []],
        [["shop.refund"], []],
        [["bank.login"], []],
        [["ledger.post"], []],
    ]
