"""Work for a batch."""

from interlock import tool


@tool("picture.shrink")
def shrink(name: str, width: int) -> dict:
    """Return the size of a thumbnail. A plain function: it runs in a thread."""
    return {"name": name, "width": 128, "height": round(128 * 3 / 4), "was": width}
