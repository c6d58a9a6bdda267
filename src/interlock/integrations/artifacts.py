"""Artifacts: write-once files in a directory or in S3."""

import hashlib
import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
from obstore.store import LocalStore, S3Store

from interlock.errors import Conflict, Invalid, NotFound, Unavailable
from interlock.settings import private_directory

# Every part begins with a letter or digit: no "..", no hidden files, nothing that a shell or a URL interprets.
_NAME = re.compile(r"[A-Za-z0-9][\w.=@+-]*(/[A-Za-z0-9][\w.=@+-]*)*", re.ASCII)


class Artifacts:
    """A store at `file:///path` or `s3://bucket/prefix`.

    S3's endpoint and credentials come from the usual AWS_* variables.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._store = _store(url)
        self._directory = self._store.prefix if isinstance(self._store, LocalStore) else None

    async def put(self, name: str, data: bytes) -> str:
        """Store the file and return its sha256.

        The same content again is accepted, as after a retry; other content raises Conflict.
        """
        digest = hashlib.sha256(data).hexdigest()
        try:
            await self._store.put_async(_checked(name), data, mode="create")
        except AlreadyExistsError:
            there = hashlib.sha256(await self.get(name)).hexdigest()
            if there != digest:
                raise Conflict(
                    f"{name} was written before, with other content; artifacts are written once",
                    code="ARTIFACT_EXISTS",
                    stored=there,
                    given=digest,
                ) from None
        except (BaseError, OSError) as error:
            raise self._away(name, "stored", error) from error
        if self._directory is not None:
            (self._directory / name).chmod(0o600)  # the store creates files by the process's umask
        return digest

    async def get(self, name: str) -> bytes:
        try:
            found = await self._store.get_async(_checked(name))
            return bytes(await found.bytes_async())
        except (NotFoundError, FileNotFoundError) as error:
            raise NotFound(f"there is no artifact {name}", code="ARTIFACT_NOT_FOUND") from error
        except (BaseError, OSError) as error:
            raise self._away(name, "read", error) from error

    def _away(self, name: str, done: str, error: Exception) -> Unavailable:
        # The first line says what happened; the rest is the library's description of the request.
        why = str(error).partition("\n")[0]
        return Unavailable(f"{name} could not be {done} in {self.url}: {why}", code="ARTIFACTS_UNAVAILABLE")


def _store(url: str) -> LocalStore | S3Store:
    parts = urlsplit(url)
    match parts.scheme:
        case "file" if parts.netloc in ("", "localhost") and parts.path.startswith("/"):
            directory = Path(unquote(parts.path))
            private_directory(directory)
            return LocalStore(directory)
        case "s3" if parts.netloc:
            # The library's default is three minutes; a caller can retry.
            retries: Any = {"max_retries": 3, "retry_timeout": timedelta(seconds=20)}
            prefix = parts.path.strip("/") or None
            return S3Store(parts.netloc, prefix=prefix, retry_config=retries, **_s3_options())
        case _:
            raise Invalid(
                f"artifacts go to file:///directory or s3://bucket/prefix, not to {url}", code="ARTIFACTS_URL"
            )


def _s3_options() -> dict[str, Any]:
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    options: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
    # A store in a private network may use HTTP. Amazon is never contacted without TLS.
    return options | ({"client_options": {"allow_http": True}} if endpoint.startswith("http://") else {})


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise Invalid(f"{name!r} cannot be the name of an artifact", code="ARTIFACT_NAME")
    return name
