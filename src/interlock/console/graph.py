"""The graph of a workflow: steps in layers from left to right, with an arrow to each step that needs another."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_BOX, _HIGH, _GAP_X, _GAP_Y, _EDGE = 168, 44, 56, 16, 8


@dataclass(frozen=True, slots=True)
class Node:
    key: str
    label: str
    status: str | None
    x: int
    y: int


@dataclass(frozen=True, slots=True)
class Drawing:
    nodes: list[Node]
    # Curves, as SVG paths.
    arrows: list[str]
    width: int
    height: int
    box: int = _BOX
    high: int = _HIGH


def draw(steps: Iterable[tuple[str, str, str | None, Sequence[str]]]) -> Drawing | None:
    """Return the graph of (key, label, status, needs), or None where the timeline is clearer.

    That is a single chain of steps, or steps of which none needs another, as in a flow.
    """
    steps = list(steps)
    needs = {key: list(wanted) for key, _, _, wanted in steps}
    layer: dict[str, int] = {}
    for key, _, _, wanted in steps:  # plans list a step after those it needs
        layer[key] = 1 + max((layer.get(need, -1) for need in wanted), default=-1)
    columns: dict[int, list[str]] = {}
    for key in layer:
        columns.setdefault(layer[key], []).append(key)
    if len(columns) < 2 or max(len(column) for column in columns.values()) < 2:
        return None
    tallest = max(len(column) for column in columns.values())
    height = tallest * (_HIGH + _GAP_Y) - _GAP_Y + 2 * _EDGE
    at: dict[str, tuple[int, int]] = {}
    for column, keys in columns.items():
        top = (height - (len(keys) * (_HIGH + _GAP_Y) - _GAP_Y)) // 2
        for row, key in enumerate(keys):
            at[key] = (_EDGE + column * (_BOX + _GAP_X), top + row * (_HIGH + _GAP_Y))
    nodes = [Node(key, _cut(label), status, *at[key]) for key, label, status, _ in steps]
    arrows = [_curve(at[need], at[key]) for key in at for need in needs[key] if need in at]
    return Drawing(nodes, arrows, 2 * _EDGE + (max(columns) + 1) * (_BOX + _GAP_X) - _GAP_X, height)


def _cut(text: str, most: int = 22) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _curve(source: tuple[int, int], target: tuple[int, int]) -> str:
    x1, y1 = source[0] + _BOX, source[1] + _HIGH // 2
    x2, y2 = target[0] - 4, target[1] + _HIGH // 2
    bend = max(24, (x2 - x1) // 2)
    return f"M{x1} {y1}C{x1 + bend} {y1} {x2 - bend} {y2} {x2} {y2}"
