"""Loading tools: from files and modules, each once, with errors that name the file and the mistake."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from interlock.errors import Invalid
from interlock.tools import load_tools, registry

TOOLS = """
from interlock.tools import tool

@tool("{name}")
def do() -> str:
    return "{name}"
"""


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Remove a test's loaded modules after the test."""
    modules, tools, path = set(sys.modules), dict(registry._tools), list(sys.path)
    yield
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    registry._tools.clear()
    registry._tools.update(tools)
    assert sys.path == path


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_a_file_is_loaded_and_registers_its_tools(tmp_path: Path) -> None:
    load_tools(write(tmp_path / "one.py", TOOLS.format(name="loading.one")))
    found = registry.find("loading.one")
    assert found is not None and found.function() == "loading.one"


def test_a_file_may_import_what_stands_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "loading_beside.py", "NAME = 'loading.beside'\n")
    text = TOOLS.format(name="loading.main") + "import loading_beside\n"
    load_tools(write(tmp_path / "main.py", text))
    assert registry.find("loading.main")


def test_a_list_of_files_may_have_spaces_gaps_and_the_same_name_in_two_folders(tmp_path: Path) -> None:
    first = write(tmp_path / "a" / "tools.py", TOOLS.format(name="loading.a"))
    second = write(tmp_path / "b" / "tools.py", TOOLS.format(name="loading.b"))
    load_tools(f" {first} , ,{second},")
    assert registry.find("loading.a") and registry.find("loading.b")
    load_tools("")


def test_a_file_is_loaded_once_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "one.py", "import builtins\nbuiltins.loaded = getattr(builtins, 'loaded', 0) + 1\n")
    monkeypatch.setattr("builtins.loaded", 0, raising=False)
    monkeypatch.chdir(tmp_path)
    load_tools(f"{path},one.py,./one.py")
    import builtins

    assert builtins.loaded == 1  # type: ignore[attr-defined]


def test_a_module_is_found_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "shop_tools" / "__init__.py", "")
    write(tmp_path / "shop_tools" / "orders.py", TOOLS.format(name="loading.module"))
    monkeypatch.chdir(tmp_path)
    load_tools("shop_tools.orders")
    assert registry.find("loading.module")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def do(:\n", "invalid syntax|SyntaxError"),
        ("import no_such_module_anywhere\n", "No module named 'no_such_module_anywhere'"),
        ("from interlock import tool\n@tool('a.b', wrties=True)\ndef b(): ...\n", "TypeError: .* 'wrties'"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_that_cannot_be_imported_is_named_with_the_reason(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path / "bad.py", text)
    with pytest.raises(Invalid, match=said) as caught:
        load_tools(path)
    assert caught.value.code == "TOOLS_INVALID"
    assert caught.value.detail.startswith(f"cannot load tools from {path}: ")


@pytest.mark.parametrize("decorator", ["tool", "flow"])
def test_a_decorator_without_a_name_says_how_to_give_one(tmp_path: Path, decorator: str) -> None:
    text = f"import interlock\n@interlock.{decorator}\nasync def refund(ctx, input): ...\n"
    with pytest.raises(Invalid, match=rf'^@{decorator} takes a name: write @{decorator}\("connector\.refund"\)$'):
        load_tools(write(tmp_path / "bare.py", text))


def test_a_file_or_module_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"cannot load tools from \S*gone\.py: no such file"):
        load_tools(str(tmp_path / "gone.py"))
    with pytest.raises(Invalid, match="cannot load tools from no_such_module: No module named 'no_such_module'"):
        load_tools("no_such_module")


def test_a_tool_that_is_wrong_says_so_itself(tmp_path: Path) -> None:
    text = "from interlock.tools import tool\n@tool('shop pay')\ndef do() -> None: ...\n"
    with pytest.raises(Invalid, match="'shop pay' is not a tool name"):
        load_tools(write(tmp_path / "bad.py", text))


def test_a_file_that_failed_can_be_mended_and_loaded_again(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    with pytest.raises(Invalid):
        load_tools(write(path, "import no_such_module_anywhere"))
    load_tools(write(path, TOOLS.format(name="loading.fixed")))
    assert registry.find("loading.fixed")


def test_the_same_tool_in_two_files_is_refused(tmp_path: Path) -> None:
    load_tools(write(tmp_path / "one.py", TOOLS.format(name="loading.twice")))
    with pytest.raises(Invalid, match=r"tool loading\.twice is defined twice"):
        load_tools(write(tmp_path / "two.py", TOOLS.format(name="loading.twice")))
