"""The tool that a delivery leads to."""

from interlock import tool


@tool("deploy.release", writes=True, risk="low", key="deploy:{repo}:{sha}")
async def release(repo: str, sha: str) -> dict:
    """Roll out one commit. The same commit of the same repository is rolled out once."""
    return {"released": f"{repo}@{sha[:7]}"}
