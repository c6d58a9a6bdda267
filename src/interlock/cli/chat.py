"""`interlock chat`: talk to an agent, watch its steps live, and decide its approvals with one key."""

import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from interlock.cli import approval_views, formatting
from interlock.cli.connection import connect
from interlock.cli.exit_codes import INTERRUPTED, TIMED_OUT, WAITS_FOR_APPROVAL, Unfinished, example
from interlock.cli.parsing import parse_seconds, visible
from interlock.lifecycle import ApprovalState, RunState, StepState

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
    message: Annotated[
        str | None,
        typer.Option(
            "--message",
            "-m",
            help="Say this, and end with the answer. Exit code 4: it waits for an approval, and says what to type.",
        ),
    ] = None,
    timeout: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="With --message: stop waiting after this time, with exit code 124."),
    ] = None,
    auto_approve: Annotated[
        bool, typer.Option("--auto-approve", help="Let pass what you may confirm: tier low and med, one person.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print events as JSON; with --message.")] = False,
) -> None:
    """Talk to an agent. Ctrl-C interrupts the agent; an empty line or Ctrl-D ends the conversation."""
    with connect(ctx) as client:
        talk = Talk(client, agent, session, auto_approve, once=message is not None, as_json=as_json)
        if message is not None:
            seconds = parse_seconds(timeout, "--timeout") if timeout else None
            if seconds == 0:  # a timer of zero never rings
                raise typer.BadParameter("expected more than 0s", param_hint="--timeout")
            try:
                with _stopping_after(seconds):
                    said_well = talk.say(message)
            except TimeoutError:
                raise talk.timed_out() from None
            if not said_well:
                raise typer.Exit(1)
            return
        if timeout is not None:
            raise typer.BadParameter("it needs --message", param_hint="--timeout")
        if as_json:
            raise typer.BadParameter("it needs --message", param_hint="--json")
        if session is not None:
            client.session(session)  # fail on an unknown session before the user types a message
        while line := talk.listen():
            talk.say(line)
        talk.leave()


@contextmanager
def _stopping_after(seconds: float | None) -> Iterator[None]:
    """Raise `TimeoutError` in the body after this many seconds."""
    if seconds is None:
        yield
        return

    def stop(_: int, __: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Talk:
    """One conversation at a terminal."""

    def __init__(
        self, client: "Client", agent: str | None, session: str | None, auto_approve: bool, *,
        once: bool = False, as_json: bool = False,
    ) -> None:  # fmt: skip
        self._client = client
        self._session = session
        self._agent = agent if session is None else None
        self._auto_approve = auto_approve or None
        self._once = once
        self._as_json = as_json
        self._out = formatting.console()
        # The run of the last message.
        self._run_id: str | None = None
        # Approvals that are left to other approvers.
        self._left: list[str] = []

    def listen(self) -> str:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return ""

    def leave(self) -> None:
        if self._session is not None:
            self._out.print(f"To continue, run: interlock chat --session {self._session}", style="dim")

    def say(self, content: str) -> bool:
        """Send a message and show the run until it ends. True if it ended well."""
        sent = self._client.say(
            content, session_id=self._session, agent=self._agent, auto_approve=self._auto_approve
        )  # fmt: skip
        self._session, self._agent = sent.session_id, None
        assert sent.run_id is not None
        self._run_id = sent.run_id
        shown = Shown(self._out)
        after, interrupted = 0, False
        while True:
            try:
                for event in self._client.follow(sent.run_id, after):
                    after = event.seq
                    self._show(shown, event)
                    if event.type in ("approval_requested", "run_transition"):
                        self._end_if_it_waits(sent.run_id)
                break
            except KeyboardInterrupt:
                if interrupted:  # the first interrupts the agent, the second ends this command
                    raise typer.Exit(INTERRUPTED) from None
                interrupted = True
                self._interrupt(sent.run_id)
        return shown.ended_well

    def timed_out(self) -> Unfinished:
        if self._run_id is None:
            return Unfinished(TIMED_OUT, "TIMED_OUT", "The server has not answered in time.")
        message = "The agent has not ended its turn in time. Its run continues."
        return Unfinished(TIMED_OUT, "TIMED_OUT", message, run_id=self._run_id, commands=[_to_watch(self._run_id)])

    def _end_if_it_waits(self, run_id: str) -> None:
        """End the command if the run waits for approvals that are left to other approvers."""
        if not self._left or self._client.run(run_id).status is not RunState.WAITING_APPROVAL:
            return
        waiting = self._client.approvals(status=ApprovalState.REQUESTED, run_id=run_id).items
        raise Unfinished(
            WAITS_FOR_APPROVAL, "WAITS_FOR_APPROVAL", "The run waits for an approval.",
            run_id=run_id, commands=[*map(_to_decide, waiting), _to_watch(run_id)],
        )  # fmt: skip

    def _interrupt(self, run_id: str) -> None:
        from interlock.client import ApiError

        with suppress(ApiError):  # the run may just have ended
            self._client.interrupt(run_id, reason="interrupted at the terminal")

    def _show(self, shown: "Shown", event: "Event") -> None:
        if self._as_json:
            formatting.print_json(event, indent=None)
            shown.note_end(event)
            if event.type == "approval_requested":
                self._left.append(str(event.data["approval_id"]))
            return
        shown.show(event)
        if event.type == "approval_requested":
            self._ask(str(event.data["approval_id"]))

    def _ask(self, approval_id: str) -> None:
        """Show an approval in full, because the approver is accountable for the decision, and ask for the decision."""
        from interlock.client import ApiError

        approval = self._client.approval(approval_id)
        if approval.status != "requested":
            return
        self._out.print(approval_views.approval_page(approval))
        if line := approval_views.barred_line(approval):
            self._out.print(line)
        if not sys.stdin.isatty():
            self._left.append(approval_id)
            return
        try:
            self._out.print(self._decide(approval))
        except ApiError as error:
            self._out.print(visible(str(error)), style="red")

    def _decide(self, approval: "Approval") -> Text:
        """Ask for one of the keys that this person may use, vote accordingly, and return the result as text."""
        digest, can = approval.action.digest, _can(approval)
        choice = self._choice(can) if can else "l"
        if choice == "l" and self._once:
            self._left.append(approval.id)
            return Text("Left to others.", style="dim")
        if choice == "l":
            return Text("Left to others. Waiting for their decision; Ctrl-C interrupts the run.", style="dim")
        if choice == "r":
            reason = self._reason("why?" if approval.reason_required else "why? (may be empty)")
            self._client.reject_approval(approval.id, reason=reason, digest=digest)
            return Text("rejected", style="red")
        reason = self._reason("why?") if approval.reason_required else None
        decided = self._client.approve_approval(approval.id, reason=reason, digest=digest)
        waits = decided.status is ApprovalState.REQUESTED
        return approval_views.voted_line() if waits else Text("approved", style="green")

    def _choice(self, can: dict[str, str]) -> str:
        """Ask until a key is pressed that is one of the choices. Any other key changes nothing."""
        _forget_typed()
        while True:
            self._out.print(f"  {'  '.join(can.values())}  [l]eave it to others ", end="", style="bold")
            pressed = typer.getchar().lower()
            choice = {"y": "a", "n": "r"}.get(pressed, pressed)
            if choice in can or choice == "l":
                return choice
            self._out.print(f"Press {', '.join(can)} or l.", style="dim")

    def _reason(self, asks: str) -> str | None:
        self._out.print()
        with suppress(EOFError):
            return input(f"  {asks} ").strip() or None
        return None


def _forget_typed() -> None:
    """Drop keys that were pressed before the question was on the screen, so that none of them answers it."""
    with suppress(termios.error, OSError, ValueError, AttributeError):
        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)


def _to_decide(approval: "Approval") -> tuple[str, str]:
    from interlock.journal import ApprovalKind

    if approval.kind == ApprovalKind.IN_DOUBT:
        return "To continue", f"interlock approval show {approval.id}"
    who = "To continue" if approval.barred is None else "For another person to continue"
    return who, f"interlock approval approve {approval.id} --digest {approval.action.digest}"


def _to_watch(run_id: str) -> tuple[str, str]:
    return "To see how it ends", f"interlock run watch {run_id}"


def _can(approval: "Approval") -> dict[str, str]:
    """Return the keys to offer. An effect in doubt cannot be approved; the approval's page says what to do instead."""
    from interlock.journal import ApprovalKind

    approve = {"a": "[a]pprove"} if approval.barred is None and approval.kind != ApprovalKind.IN_DOUBT else {}
    return approve | ({"r": "[r]eject"} if approval.may_reject else {})


class Shown:
    """Prints a run for a person at a terminal: text as it arrives, and tool calls with their marks."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._speaking: tuple[Any, Any] | None = None
        self._tools: dict[str, str] = {}
        self._told: set[tuple[str, Any]] = set()
        self.ended_well = False

    def show(self, event: "Event") -> None:
        from interlock.wire import why_cut

        data, key = event.data, str(event.data.get("step_key", ""))
        match event.type:
            case "message_delta":
                self._speak((key, data.get("attempt")), str(data["text"]))
            case "message":
                if self._speaking is None or self._speaking[0] != key:
                    self._speak((key, None), str(data["text"]))
                self._stop_speaking()
                if why := why_cut(data):
                    self._out.print(visible(f"This is not a whole answer: {why}."), style="yellow")
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
            self._stop_speaking()  # the model is called again: discard its previous text
        self._speaking = who
        self._out.print(visible(text), end="", soft_wrap=True)

    def _stop_speaking(self) -> None:
        if self._speaking is not None:
            self._out.print()
        self._speaking = None

    def _call(self, key: str, data: dict[str, Any]) -> None:
        declared = data.get("declares") or {}
        if declared.get("kind") == "tool":
            given = ", ".join(f"{name}={formatting.cell(value)}" for name, value in declared.get("input", {}).items())
            self._tools[key] = f"{declared['tool']}({given})"
        state = data.get("to_state")
        if key not in self._tools or state not in _MARKS or (key, state) in self._told:
            return
        self._told.add((key, state))  # print the start of a step once, not for each attempt
        self._stop_speaking()
        mark, style = _MARKS[StepState(state)]
        why = formatting.brief(data.get("error"))
        self._out.print(f"{mark} {visible(self._tools[key])}" + (f"  {why}" if why else ""), style=style)

    def _end(self, data: dict[str, Any]) -> None:
        if data.get("reason") != "completed":
            why = formatting.brief(data.get("error"))
            said = f"{data.get('to_state')}: {data.get('reason')}" + (f": {why}" if why else "")
            self._out.print(visible(said), style="dim" if self.ended_well else "red")
