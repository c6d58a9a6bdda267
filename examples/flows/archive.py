"""A flow: a loop over what a step found, which YAML cannot express, with one question to a person."""

from interlock import FlowContext, Rejected, flow, tool

DOCUMENTS = {"a.txt": 40, "b.txt": 400, "c.txt": 900}  # age in days


@tool("archive.list")
async def list_documents(older_than: int) -> list[str]:
    """Return the names of the documents that are older."""
    return [name for name, days in DOCUMENTS.items() if days > older_than]


@tool("archive.delete", writes=True, risk="low", key="archive:delete:{name}")
async def delete(name: str) -> dict:
    """Delete a document."""
    return {"deleted": name}


@flow("archive")
async def archive(ctx: FlowContext, input: dict) -> dict:
    """Delete old documents, once a person has agreed."""
    names = await ctx.call("archive.list", older_than=input["days"])
    if not names:
        return {"deleted": 0}
    try:
        await ctx.approve("delete", tier="med", summary=f"Delete {', '.join(names)}?")
    except Rejected:
        return {"deleted": 0}
    await ctx.sleep("1s")
    await ctx.gather(*(ctx.call("archive.delete", name=name) for name in names))
    return {"deleted": len(names)}
