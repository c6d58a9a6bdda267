"""Check signatures of deliveries, over the raw bytes and in constant time."""

import base64
import hashlib
import hmac
import re
from collections.abc import Mapping
from datetime import UTC, datetime

from standardwebhooks import Webhook

from interlock.errors import Unauthorized

# As in Standard Webhooks and Slack: an older timestamp is a replay.
_TOLERANCE_SECONDS = 300
_BASE64 = re.compile("[A-Za-z0-9+/]{4,}={0,2}")


def check_github(secret: str, body: bytes, headers: Mapping[str, str]) -> None:
    given = headers.get("x-hub-signature-256", "")
    if not given:
        raise _invalid("X-Hub-Signature-256 is missing: set the secret at GitHub too")
    if not _equal(given, "sha256=" + _mac(secret, body).hex()):
        raise _invalid("X-Hub-Signature-256 is not of these bytes and the trigger's secret")


def check_hmac(secret: str, body: bytes, given: str, header: str) -> None:
    """Check an HMAC-SHA256 in hex or base64, alone or after `sha256=`."""
    mac = _mac(secret, body)
    value = given.removeprefix("sha256=")
    if not (_equal(value.lower(), mac.hex()) or _equal(value, base64.b64encode(mac).decode())):
        raise _invalid(f"{header} is not the HMAC-SHA256 of these bytes with the trigger's secret")


def check_standard(secret: str, body: bytes, headers: Mapping[str, str], now: datetime) -> None:
    """Check a Standard Webhooks signature: it covers id, time and body, and one of several must match."""
    message_id, sent = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    if not message_id or not sent.isascii() or not sent.isdigit() or len(sent) > 11:
        raise _invalid("webhook-id, webhook-timestamp (in seconds) and webhook-signature are to be there")
    at = datetime.fromtimestamp(int(sent), UTC)
    if abs((now - at).total_seconds()) > _TOLERANCE_SECONDS:
        raise _invalid(f"webhook-timestamp is more than {_TOLERANCE_SECONDS // 60} minutes off; sign it again")
    try:
        ours = Webhook(secret).sign(message_id, at, body.decode())
    except UnicodeDecodeError:
        raise _invalid("the body is not UTF-8") from None
    if not any(_equal(given, ours) for given in headers.get("webhook-signature", "").split()):
        raise _invalid("webhook-signature is not of this id, time and body with the trigger's secret")


def why_unfit_for_standard(secret: str) -> str | None:
    """Return why the secret is unusable, or None.

    The library skips characters that are not base64, and would sign with a part of the secret.
    """
    if _BASE64.fullmatch(secret.removeprefix("whsec_")):
        return None
    return "a secret of Standard Webhooks is base64, with or without whsec_ before it"


def _mac(secret: str, body: bytes) -> bytes:
    return hmac.new(secret.encode(), body, hashlib.sha256).digest()


def _equal(given: str, ours: str) -> bool:
    return hmac.compare_digest(given.encode(), ours.encode())


def _invalid(why: str) -> Unauthorized:
    return Unauthorized(why, code="SIGNATURE_INVALID")
