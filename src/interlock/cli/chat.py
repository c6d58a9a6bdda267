"""`interlock chat`: talk to an agent; see what it does as it does it, and allow it or not with one key."""

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from interlock.cli import decisions, show
from interlock.cli.connection import connect
from interlock.cli.outcome import INTERRUPTED, example
from interlock.cli.text import visible
from interlock.lifecycle import ApprovalState, StepState

if TYPE_CHECKING:
    from interlock.client import Client
    from interlock.wire import Approval, Event

_MARKS = {
    StepState.RUNNING: ("…", "dim"),
    StepState.SUCCEEDED: ("✓", "green"),
    StepState.FAILED: ("✗", "red"),
    StepState.SKIPPED: ("–", "dim"),
}


def register(app: typer.Typer) -> None:
    app.command(
        epilog=example(
            "interlock chat", "interlock chat --agent support", 'interlock chat --agent support -m "refund ch_1"'
        )
    )(chat)


def chat(
    ctx: typer.Context,
    agent: Annotated[str | None, typer.Option(help="Whom to talk to; else the assistant.")] = None,
    session: Annotated[str | None, typer.Option(metavar="SESSION", help="Take up a conversation again.")] = None,
    message: Annotated[str | None, typer.Option("--message", "-m", help="Say this, and end with the answer.")] = None,
    auto_approve: Annotated[bool, typer.Option("--auto-approve", help="Let pass what is not high.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print events as JSON; with --message.")] = False,
) -> None:
    """Talk to an agent. Ctrl-C interrupts what it does; an empty line or Ctrl-D ends the conversation."""
    with connect(ctx) as client:
        talk = Talk(client, agent, session, auto_approve, as_json=as_json)
        if message is not None:
            if not talk.say(message):
                raise typer.Exit(1)
            return
        if as_json:
            raise typer.BadParameter("it needs --message", param_hint="--json")
        if session is not None:
            client.session(session)  # before anybody types what there is nobody to hear
        while line := talk.listen():
            talk.say(line)
        talk.leave()


class Talk:
    """One conversation at a terminal."""

    def __init__(
        self, client: "Client", agent: str | None, session: str | None, auto_approve: bool, *, as_json: bool
    ) -> None:
        self._client = client
        self._session = session
        self._agent = agent if session is None else None
        self._auto_approve = auto_approve or None
        self._as_json = as_json
        self._out = show.console()

    def listen(self) -> str:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return ""

    def leave(self) -> None:
        if self._session is not None:
            self._out.print(f"interlock chat --session {self._session} goes on from here", style="dim")

    def say(self, content: str) -> bool:
        """Say it and show what comes of it, to the end. True if that was a good one."""
        sent = self._client.say(
            content, session_id=self._session, agent=self._agent, auto_approve=self._auto_approve
        )  # fmt: skip
        self._session, self._agent = sent.session_id, None
        assert sent.run_id is not None
        shown = Shown(self._out)
        after, interrupted = 0, False
        while True:
            try:
                for event in self._client.follow(sent.run_id, after):
                    after = event.seq
                    self._show(shown, event)
                break
            except KeyboardInterrupt:
                if interrupted:  # once is for the agent, twice is for us
                    raise typer.Exit(INTERRUPTED) from None
                interrupted = True
                self._interrupt(sent.run_id)
        return shown.ended_well

    def _interrupt(self, run_id: str) -> None:
        from interlock.client import ApiError

        with suppress(ApiError):  # it may just have ended
            self._client.interrupt(run_id, reason="interrupted at the terminal")

    def _show(self, shown: "Shown", event: "Event") -> None:
        if self._as_json:
            show.print_json(event, indent=None)
            shown.note_end(event)
            return
        shown.show(event)
        if event.type == "approval_requested":
            self._ask(str(event.data["approval_id"]))

    def _ask(self, approval_id: str) -> None:
        """What is asked is shown whole: whoever says yes answers for it."""
        from interlock.client import ApiError

        approval = self._client.approval(approval_id)
        if approval.status != "requested":
            return
        self._out.print(decisions.approval_page(approval))
        if line := decisions.barred_line(approval):
            self._out.print(line)
        if not sys.stdin.isatty():
            self._out.print(f"interlock approval approve {approval_id} goes on", style="dim")
            return
        try:
            self._out.print(self._decide(approval))
        except ApiError as error:
            self._out.print(visible(str(error)), style="red")

    def _decide(self, approval: "Approval") -> Text:
        """One key, of those that would count for this person; then what became of it."""
        digest, can = approval.action.digest, _can(approval)
        if not can:
            return Text("left to others; waiting", style="dim")
        self._out.print(f"  {'  '.join(can.values())}  [l]eave it to others ", end="", style="bold")
        pressed = typer.getchar().lower()
        choice = {"y": "a", "n": "r"}.get(pressed, pressed)
        if choice not in can:
            return Text("left to others; waiting", style="dim")
        if choice == "r":
            reason = self._reason("why?" if approval.reason_required else "why? (may be empty)")
            self._client.reject_approval(approval.id, reason=reason, digest=digest)
            return Text("rejected", style="red")
        reason = self._reason("why?") if approval.reason_required else None
        decided = self._client.approve_approval(approval.id, reason=reason, digest=digest)
        waits = decided.status is ApprovalState.REQUESTED
        return Text("approved: one more person has to decide" if waits else "approved", style="green")

    def _reason(self, asks: str) -> str | None:
        self._out.print()
        with suppress(EOFError):
            return input(f"  {asks} ").strip() or None
        return None


def _can(approval: "Approval") -> dict[str, str]:
    """The keys to offer. What became of an effect in doubt is no question for a yes; the page says what to do."""
    from interlock.journal import AskKind

    approve = {"a": "[a]pprove"} if approval.barred is None and approval.kind != AskKind.IN_DOUBT else {}
    return approve | ({"r": "[r]eject"} if approval.may_reject else {})


class Shown:
    """A run as people at a terminal see it: text as it comes, calls with their marks."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._speaking: tuple[Any, Any] | None = None
        self._tools: dict[str, str] = {}
        self._told: set[tuple[str, Any]] = set()
        self.ended_well = False

    def show(self, event: "Event") -> None:
        data, key = event.data, str(event.data.get("step_key", ""))
        match event.type:
            case "message_delta":
                self._speak((key, data.get("attempt")), str(data["text"]))
            case "message":
                if self._speaking is None or self._speaking[0] != key:
                    self._speak((key, None), str(data["text"]))
                self._stop_speaking()
            case "step_transition" | "approval_requested":
                self._call(key, data)
            case "run_completed":
                self._stop_speaking()
                self.note_end(event)
                self._end(data)

    def note_end(self, event: "Event") -> None:
        if event.type == "run_completed":
            self.ended_well = event.data.get("to_state") == "succeeded"

    def _speak(self, who: tuple[Any, Any], text: str) -> None:
        if self._speaking is not None and self._speaking != who:
            self._stop_speaking()  # the model is asked again: what it said before does not count
        self._speaking = who
        self._out.print(visible(text), end="", soft_wrap=True)

    def _stop_speaking(self) -> None:
        if self._speaking is not None:
            self._out.print()
        self._speaking = None

    def _call(self, key: str, data: dict[str, Any]) -> None:
        declared = data.get("declares") or {}
        if declared.get("kind") == "tool":
            given = ", ".join(f"{name}={show.cell(value)}" for name, value in declared.get("input", {}).items())
            self._tools[key] = f"{declared['tool']}({given})"
        state = data.get("to_state")
        if key not in self._tools or state not in _MARKS or (key, state) in self._told:
            return
        self._told.add((key, state))  # that it runs is said once, however often it is tried
        self._stop_speaking()
        mark, style = _MARKS[StepState(state)]
        why = show.brief(data.get("error"))
        self._out.print(f"{mark} {visible(self._tools[key])}" + (f"  {why}" if why else ""), style=style)

    def _end(self, data: dict[str, Any]) -> None:
        if data.get("reason") != "completed":
            why = show.brief(data.get("error"))
            said = f"{data.get('to_state')}: {data.get('reason')}" + (f": {why}" if why else "")
            self._out.print(visible(said), style="dim" if self.ended_well else "red")
