"""Granting access: a write with a high risk, which the policy that comes with Interlock holds for two people."""

from interlock import tool


@tool("access.grant", writes=True, risk="high", key="access:{person}:{role}", target="{person}", show=["role"])
async def grant(person: str, role: str) -> dict:
    """Give a person a role in production."""
    return {"person": person, "role": role}
