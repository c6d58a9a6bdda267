"""Senders: requests of GitHub and others, with their signatures."""

import copy
import hashlib
import hmac
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import httpx2
import orjson
from standardwebhooks import Webhook

from interlock import clock
from tests.rig import Rig

SECRET = "It's a Secret to Everybody"
STANDARD_SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

_REPOSITORY = {
    "id": 186853002, "node_id": "MDEwOlJlcG9zaXRvcnkxODY4NTMwMDI=", "name": "shop", "full_name": "acme/shop",
    "private": False, "owner": {"login": "acme", "id": 21031067, "type": "Organization", "site_admin": False},
    "html_url": "https://github.com/acme/shop", "fork": False, "url": "https://api.github.com/repos/acme/shop",
    "default_branch": "main", "visibility": "private", "topics": [], "stargazers_count": 0, "open_issues": 2,
}  # fmt: skip
_SENDER = {"login": "ada", "id": 21031068, "node_id": "MDQ6VXNlcjIxMDMxMDY3", "type": "User", "site_admin": False}
_PULL = {
    "url": "https://api.github.com/repos/acme/shop/pulls/7", "id": 279147437, "number": 7, "state": "open",
    "html_url": "https://github.com/acme/shop/pull/7", "locked": False,
    "title": "Refund in full", "user": _SENDER, "body": "It rounds now.", "draft": False,
    "created_at": "2026-11-16T09:20:17Z", "updated_at": "2026-11-16T09:20:17Z", "labels": [], "merged": False,
    "head": {"label": "acme:refunds", "ref": "refunds", "sha": "ec26c3e57ca3a959ca5aad62de7213c562f8c821"},
    "base": {"label": "acme:main", "ref": "main", "sha": "f95f852bd8fca8fcc58a9a2d6c842781e32a215e"},
    "commits": 1, "additions": 12, "deletions": 3, "changed_files": 2,
}  # fmt: skip
_COMMIT = {
    "id": "6113728f27ae82c7b1a177c8d03f9e96e0adf246", "tree_id": "4b825dc642cb6eb9a060e54bf8d69288fbee4904",
    "distinct": True, "message": "Round refunds", "timestamp": "2026-11-16T10:20:17+01:00",
    "author": {"name": "Ada", "email": "ada@example.com", "username": "ada"}, "added": [], "removed": [],
    "modified": ["shop/refund.py"],
}  # fmt: skip
_ISSUE = {
    "url": "https://api.github.com/repos/acme/shop/issues/7", "id": 444500041, "number": 7, "title": "Refund in full",
    "user": _SENDER, "state": "open", "locked": False, "comments": 1, "labels": [],
}  # fmt: skip

# GitHub's payload by event name.
GITHUB: dict[str, dict[str, Any]] = {
    "push": {
        "ref": "refs/heads/main", "before": "f95f852bd8fca8fcc58a9a2d6c842781e32a215e", "after": _COMMIT["id"],
        "repository": _REPOSITORY, "pusher": {"name": "ada", "email": "ada@example.com"}, "sender": _SENDER,
        "created": False, "deleted": False, "forced": False, "base_ref": None, "commits": [_COMMIT],
        "head_commit": _COMMIT, "compare": "https://github.com/acme/shop/compare/f95f852bd8fc...6113728f27ae",
    },
    "pull_request.opened": {
        "action": "opened", "number": 7, "pull_request": _PULL, "repository": _REPOSITORY, "sender": _SENDER,
    },
    "pull_request.synchronize": {
        "action": "synchronize", "number": 7, "before": _PULL["base"]["sha"], "after": _PULL["head"]["sha"],  # type: ignore[index]
        "pull_request": _PULL, "repository": _REPOSITORY, "sender": _SENDER,
    },
    "pull_request.labeled": {
        "action": "labeled", "number": 7, "pull_request": _PULL, "repository": _REPOSITORY, "sender": _SENDER,
        "label": {"id": 1, "name": "deploy", "color": "d73a4a", "default": False},
    },
    "pull_request_review.submitted": {
        "action": "submitted", "pull_request": _PULL, "repository": _REPOSITORY, "sender": _SENDER,
        "review": {"id": 237895671, "user": _SENDER, "body": "Good.", "state": "approved", "commit_id": _COMMIT["id"]},
    },
    "issue_comment.created": {
        "action": "created", "repository": _REPOSITORY, "sender": _SENDER,
        "issue": {**_ISSUE, "pull_request": {"url": "https://api.github.com/repos/acme/shop/pulls/7"}},
        "comment": {"id": 492700400, "user": _SENDER, "body": "/deploy to «staging» 🚀", "author_association": "OWNER",
                    "created_at": "2026-11-16T09:21:00Z", "updated_at": "2026-11-16T09:21:00Z"},
    },
    "issues.opened": {"action": "opened", "issue": _ISSUE, "repository": _REPOSITORY, "sender": _SENDER},
    "release.published": {
        "action": "published", "repository": _REPOSITORY, "sender": _SENDER,
        "release": {"id": 17372790, "tag_name": "v1.2.0", "target_commitish": "main", "name": "1.2", "draft": False,
                    "prerelease": False, "author": _SENDER, "assets": [], "body": None},
    },
    "workflow_run.completed": {
        "action": "completed", "repository": _REPOSITORY, "sender": _SENDER,
        "workflow_run": {"id": 30433642, "name": "Build", "head_branch": "main", "head_sha": _COMMIT["id"],
                         "status": "completed", "conclusion": "success", "run_attempt": 1},
    },
}  # fmt: skip


def sample(name: str, number: int | None = None, **changes: Any) -> dict[str, Any]:
    """Return GitHub's payload for an event; with a number, that of another pull request."""
    payload = copy.deepcopy(GITHUB[name])
    if number is not None:
        payload["number"] = number
        for part in ("pull_request", "issue"):
            if part in payload:
                payload[part]["number"] = number
    return payload | changes


async def from_github(
    rig: Rig, name: str, payload: Any = None, *, to: str = "hook", delivery: str | None = None, secret: str = SECRET,
    tenant: str | None = None, http: httpx2.AsyncClient | None = None, headers: dict[str, str] | None = None,
) -> httpx2.Response:  # fmt: skip
    body = orjson.dumps(sample(name) if payload is None else payload)
    signed = {
        "accept": "*/*", "content-type": "application/json", "user-agent": "GitHub-Hookshot/044aadd",
        "x-github-delivery": delivery or str(uuid4()), "x-github-event": name.partition(".")[0],
        "x-github-hook-id": "292430182", "x-github-hook-installation-target-type": "repository",
        "x-hub-signature-256": "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest(),
    }  # fmt: skip
    query = {"tenant": tenant} if tenant else None
    client = http or rig.http("")
    return await client.post(f"/api/hooks/github/{to}", content=body, headers=signed | (headers or {}), params=query)


async def standard(
    rig: Rig, payload: Any, *, to: str = "hook", id: str | None = None, secret: str = STANDARD_SECRET,
    at: float | None = None, body: bytes | None = None,
) -> httpx2.Response:  # fmt: skip
    """Sign by Standard Webhooks; `body` replaces the signed text."""
    text = orjson.dumps(payload).decode()
    message_id = id or f"msg_{uuid4().hex}"
    moved = rig.clock()
    sent = datetime.fromtimestamp(at, UTC) if at is not None else moved or clock.now()
    headers = {
        "content-type": "application/json", "webhook-id": message_id, "webhook-timestamp": str(int(sent.timestamp())),
        "webhook-signature": "v1,bm90IG91cnM= " + Webhook(secret).sign(message_id, sent, text),
    }  # fmt: skip
    return await rig.http("").post(f"/api/hooks/{to}", content=body or text.encode(), headers=headers)
