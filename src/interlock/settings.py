"""Settings: every value an operator can change, read from INTERLOCK_* variables."""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Literal
from uuid import UUID

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="INTERLOCK_", extra="ignore", env_ignore_empty=True, populate_by_name=True
    )

    database_url: str | None = Field(None, description="A PostgreSQL ≥ 15; unset starts the embedded one.")
    database_schema: str = Field(
        "interlock",
        validation_alias="INTERLOCK_SCHEMA",
        pattern=r"^[a-z_][a-z0-9_]{0,47}$",
        description="The PostgreSQL schema of all tables. Installations with different schemas can share a database.",
    )
    data_dir: Path = Field(Path(".interlock"), description="Embedded database, artifacts, keys, address of the server.")
    host: str = Field("127.0.0.1", description="Where the API listens.")
    port: int = Field(8420, ge=0, le=65535, description="Where the API listens; 0 picks a free port.")
    public_url: str | None = Field(
        None,
        pattern=r"^https?://[^\s<>|?#]+$",
        description="The address that links in Slack cards and webhooks use, like https://interlock.example.com.",
    )
    model: str | None = Field(
        None, description="provider:name of the built-in assistant's model; unset: a script that does as it is told."
    )
    tools: str = Field("", description="Python files or modules with `@tool`s and `@flow`s, comma-separated.")
    mcp: Path | None = Field(None, description="The file with the MCP servers; else mcp.json in the data.")
    bootstrap_key: str | None = Field(
        None,
        min_length=16,
        description="Becomes the admin key of tenant `default` if no key exists yet; 16 characters or more.",
    )

    lease_seconds: PositiveFloat = Field(
        30.0, description="How long a silent worker keeps its runs; then they are orphaned, and others take them up."
    )
    heartbeat_seconds: PositiveFloat = Field(
        10.0, le=30, description="How often a worker says that it is alive, and in any case four times in a lease."
    )
    concurrency: PositiveInt = Field(100, description="Runs that one worker process holds at a time.")
    slice_seconds: PositiveFloat = Field(5.0, description="How long a run keeps its worker while others wait.")
    poll_seconds: PositiveFloat = Field(1.0, description="The slow poll beneath the notifications.")
    drain_seconds: PositiveFloat = Field(30.0, description="How long a stopping worker lets its steps finish.")
    worker_memory_mb: PositiveInt | None = Field(
        None, description="A worker that uses more pauses, gives its runs back, and goes on when it has room again."
    )
    max_reclaims: PositiveInt = Field(5, description="How often a step may lose its worker before its run fails.")
    event_keep_seconds: PositiveFloat = Field(
        7 * 86400.0, description="How long an event from outside is kept for a step that may wait for it."
    )
    retention_days: PositiveInt | None = Field(
        None,
        description="Journal months older than this are taken out, and after the grace time dropped with what was said"
        " to agents in them.",
    )
    retention_grace_days: NonNegativeInt = Field(
        7, description="How long a month that retention took out can be put back with `interlock db keep`."
    )

    statement_timeout_seconds: PositiveFloat = Field(30.0, description="No statement runs longer.")
    lock_timeout_seconds: PositiveFloat = Field(10.0, description="No statement waits longer for a lock.")
    database_patience_seconds: PositiveFloat = Field(20.0, description="How long a request waits for a lost database.")
    pool_size: PositiveInt = Field(10, description="Database connections of one API process.")
    idempotency_lock_seconds: PositiveFloat = Field(
        300.0, description="After so long a request that nobody answered may be made again under its key."
    )
    max_body_bytes: PositiveInt = Field(1_000_000, description="The largest request body that is accepted.")
    max_requests_per_key: PositiveInt = Field(1000, description="Requests of one key that may be under way at a time.")
    max_streams_per_key: PositiveInt = Field(100, description="Event streams of one key that may be open at a time.")
    max_bytes_per_key: PositiveInt = Field(
        64_000_000, description="Bytes of request bodies of one key that may be under way at a time."
    )
    max_requests_per_tenant: PositiveInt = Field(
        4000, description="Requests of all keys of a tenant that may be under way at a time."
    )
    max_streams_per_tenant: PositiveInt = Field(
        400, description="Event streams of all keys of a tenant that may be open at a time."
    )
    max_bytes_per_tenant: PositiveInt = Field(
        256_000_000, description="Bytes of request bodies of all keys of a tenant that may be under way at a time."
    )
    max_kept_events: PositiveInt = Field(
        10_000, description="Events from outside that a tenant may have kept for a step that may wait for them."
    )
    max_schedules: PositiveInt = Field(1000, description="Schedules that a tenant may have.")
    max_tool_call_plans: PositiveInt = Field(
        10_000, description="Combinations of a tool and names of arguments that a tenant may have called one at a time."
    )
    request_read_seconds: PositiveFloat = Field(
        20.0, description="How long a client may take to send a request; a larger body gets more, at 10 KB a second."
    )
    max_failed_sign_ins: PositiveInt = Field(
        60, description="Wrong keys that one address may try in a minute, in the API and the console."
    )
    max_output_bytes: PositiveInt = Field(1_000_000, description="The largest output a step may return.")

    signing_key: SecretStr | None = Field(
        None, description="Signs checkpoints and evidence: an Ed25519 key in PEM or its file; else signing.key, made."
    )
    redaction_key: SecretStr | None = Field(
        None, min_length=16, description="The secret behind the hashes in metadata; else redaction.key, made."
    )
    secrets_key: SecretStr | None = Field(
        None, description="Encrypts stored secrets: 32 bytes in base64, then earlier ones; else secrets.key, made."
    )
    artifacts: str | None = Field(
        None, description="Where evidence goes: file:///directory or s3://bucket/prefix; else artifacts/ in the data."
    )

    metrics_token: SecretStr | None = Field(
        None, min_length=16, description="What may read /metrics besides a key of tenant `default`: sent as a key is."
    )

    slack_token: SecretStr | None = Field(None, description="The bot token (xoxb-…); without it nothing goes to Slack.")
    slack_signing_secret: SecretStr | None = Field(None, description="Buttons and commands must be signed with it.")
    slack_channel: str | None = Field(None, description="Where the approvals of tenant `default` are posted.")
    slack_base_url: str = Field("https://slack.com/api/", description="Slack's API, or a stand-in for it.")
    webhook_allow_private: bool = Field(False, description="Let webhooks call loopback and private addresses.")
    webhook_timeout_seconds: PositiveFloat = Field(10.0, description="How long a webhook's receiver may take.")
    webhook_disable_days: PositiveInt = Field(5, description="A webhook that failed for so long is switched off.")

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="The least that is logged.")
    log_format: Literal["auto", "json", "console"] = Field("auto", description="auto: console on a terminal.")


def variable_of(name: str) -> str:
    """Return the environment variable of a setting."""
    return str(Settings.model_fields[name].validation_alias or f"INTERLOCK_{name.upper()}")


def console_link(settings: Settings, path: str) -> str | None:
    """Return the address of a console page for people who read a message elsewhere, or None if it is not known."""
    return f"{settings.public_url.rstrip('/')}{path}" if settings.public_url else None


def mcp_file(settings: Settings) -> Path:
    return settings.mcp or settings.data_dir / "mcp.json"


def private_directory(path: Path) -> Path:
    """Return the directory. Create it for its owner only, if it does not exist."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def logs_dir(settings: Settings) -> Path:
    """Return the directory where a supervisor's workers write their log files, one each."""
    return settings.data_dir / "logs"


def worker_log(settings: Settings, worker_id: UUID | str) -> Path:
    return logs_dir(settings) / f"worker-{worker_id}.log"


# This process's metrics directories: locked while it lives, and unlocked by the kernel if it is killed.
_ours: list[int] = []


def share_metrics(data_dir: Path) -> None:
    """Let a server show the metrics of its workers too. Call this before the metrics are made.

    Each server has its own directory: another server on the same data, even one that fails to bind its port, must not
    delete the counts of this one.
    """
    base = data_dir.absolute() / "metrics"
    private_directory(base)
    looking = os.open(base, os.O_RDONLY)
    try:
        fcntl.flock(looking, fcntl.LOCK_EX)  # no process may delete a directory that was just made
        for left in base.iterdir():
            if _is_free(left):
                shutil.rmtree(left, ignore_errors=True)
        own = tempfile.mkdtemp(dir=base)
        _ours.append(os.open(own, os.O_RDONLY))
        fcntl.flock(_ours[-1], fcntl.LOCK_EX)
    finally:
        os.close(looking)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = own


def _is_free(directory: Path) -> bool:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
