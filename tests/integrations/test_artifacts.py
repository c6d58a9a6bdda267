"""A directory and S3 both write an artifact once."""

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from interlock.errors import Conflict, Invalid, NotFound, Unavailable
from interlock.integrations.artifacts import Artifacts


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def aws(s3: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in {
        "AWS_ENDPOINT_URL": s3, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "eu-west-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    return s3


@pytest.fixture(params=["file", "s3"])
def artifacts(request: pytest.FixtureRequest, tmp_path: Path) -> Artifacts:
    if request.param == "file":
        return Artifacts(f"file://{tmp_path}/made/for%20us")
    url = request.getfixturevalue("aws")
    bucket = "b-" + hashlib.sha256(request.node.name.encode()).hexdigest()[:16]
    location = {"LocationConstraint": "eu-west-1"}
    boto3.client("s3", endpoint_url=url).create_bucket(Bucket=bucket, CreateBucketConfiguration=location)
    return Artifacts(f"s3://{bucket}/evidence/main")


async def test_what_was_put_is_there(artifacts: Artifacts) -> None:
    digest = await artifacts.put("runs/2026/a.dsse.json", b"content")
    assert digest == hashlib.sha256(b"content").hexdigest()
    assert await artifacts.get("runs/2026/a.dsse.json") == b"content"


async def test_the_same_again_is_fine_and_anything_else_is_refused(artifacts: Artifacts) -> None:
    digest = await artifacts.put("a", b"content")
    assert await artifacts.put("a", b"content") == digest
    with pytest.raises(Conflict, match="written once") as refused:
        await artifacts.put("a", b"other")
    assert refused.value.fields["stored"] == digest
    assert await artifacts.get("a") == b"content"


async def test_of_many_at_the_same_time_one_wins(artifacts: Artifacts) -> None:
    results = await asyncio.gather(*(artifacts.put("a", b"%d" % n) for n in range(8)), return_exceptions=True)
    won = [result for result in results if isinstance(result, str)]
    assert len(won) == 1 and all(isinstance(result, str | Conflict) for result in results)
    assert hashlib.sha256(await artifacts.get("a")).hexdigest() == won[0]


async def test_a_large_one_arrives_whole(artifacts: Artifacts) -> None:
    data = bytes(range(256)) * 40_000
    digest = await artifacts.put("large", data)
    assert hashlib.sha256(await artifacts.get("large")).hexdigest() == digest
    with pytest.raises(Conflict):
        await artifacts.put("large", data + b"!")


async def test_what_is_not_there_is_not_found(artifacts: Artifacts) -> None:
    with pytest.raises(NotFound):
        await artifacts.get("nothing/here")


@pytest.mark.parametrize(
    "name", ["", "/a", "a/", "../a", "a/../b", "a//b", ".hidden", "a b", "a\n", "é", "a?b", "a%2fb"]
)
async def test_names_that_could_mean_another_place_are_refused(tmp_path: Path, name: str) -> None:
    artifacts = Artifacts(f"file://{tmp_path}")
    with pytest.raises(Invalid):
        await artifacts.put(name, b"")
    with pytest.raises(Invalid):
        await artifacts.get(name)


@pytest.mark.parametrize("url", ["", "a/b", "file://host/a", "s3://", "ftp://x/y", "file:a"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(Invalid, match="file:///directory or s3://bucket/prefix"):
        Artifacts(url)


async def test_a_bucket_that_does_not_exist_is_said_so(aws: str) -> None:
    with pytest.raises((Unavailable, NotFound)):
        await Artifacts("s3://no-such-bucket").put("a", b"x")
