"""Images and audio from tools: sent to a model as media instead of base64 text, within limits."""

from base64 import b64decode
from binascii import Error as NotBase64
from dataclasses import dataclass
from typing import Any

from pydantic_ai.messages import BinaryContent

# MCP's content blocks. Other tools may return a list of them too.
_BLOCKS = frozenset({"text", "image", "audio", "resource", "resource_link"})
_MEDIA_TYPES = frozenset(
    {"image/png", "image/jpeg", "image/gif", "image/webp", "audio/wav", "audio/mpeg", "audio/mp3", "audio/ogg"}
)
_MOST_FILES = 8
_MOST_BYTES = 4_000_000


@dataclass(slots=True)
class Allowance:
    """What one request may still include. Media of earlier messages of a session are not sent again."""

    files: int = _MOST_FILES
    bytes: int = _MOST_BYTES

    def take(self, size: int) -> bool:
        if self.files < 1 or self.bytes < size:
            return False
        self.files -= 1
        self.bytes -= size
        return True


def shown(output: Any, allowance: Allowance) -> Any:
    """Return a tool's output as the model receives it.

    Content blocks that contain media become media; everything else is unchanged.
    """
    if not isinstance(output, list) or not all(_is_block(item) for item in output):
        return output
    if not any(item["type"] in ("image", "audio") for item in output):
        return output
    return [_block(item, allowance) for item in output]


def _is_block(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") in _BLOCKS


def _block(item: dict[str, Any], allowance: Allowance) -> Any:
    if item["type"] not in ("image", "audio"):
        return item.get("text") or item
    media_type = str(item.get("mime_type") or item.get("mimeType"))
    try:
        data = b64decode(item.get("data") or "", validate=True)
    except (NotBase64, TypeError, ValueError):
        return f"[{item['type']} of {media_type:.100}: its data is not base64]"
    if media_type not in _MEDIA_TYPES or not allowance.take(len(data)):
        return f"[{item['type']} of {media_type:.100}, {len(data):,} bytes: not shown]"
    return BinaryContent(data=data, media_type=media_type)
