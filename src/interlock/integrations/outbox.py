"""The dispatcher: claims due messages from the outbox, sends them, and records the result."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Protocol
from uuid import UUID

from interlock.engine import outbox
from interlock.engine.access.principal import DEFAULT_TENANT
from interlock.engine.outbox import Delivered, OutboxMessage, Undelivered
from interlock.errors import Unavailable
from interlock.integrations.webhooks import WebhookSender
from interlock.settings import Settings
from interlock.store.notify import OUTBOX, Listener
from interlock.store.pool import TRANSIENT, Database, Tx
from interlock.telemetry import log
from interlock.timeouts import wait_for_event

_MOST_BUSY = 100


class Sender(Protocol):
    """Sends messages. `one_by_one`: messages to a destination are sent in sequence, until it asks for a pause."""

    one_by_one: bool

    async def send(self, message: OutboxMessage) -> Delivered | Undelivered: ...

    async def close(self) -> None: ...


def senders_for(database: Database, settings: Settings) -> dict[str, Sender]:
    """Return the senders of this process. Without Slack's token it leaves Slack messages to a process that has it."""
    senders: dict[str, Sender] = {"webhook": WebhookSender(database, settings)}
    if settings.slack_token is not None:
        # Imported here, because it takes a second and most servers do not use it.
        from interlock.integrations.slack import SlackSender

        senders["slack"] = SlackSender(database, settings)
    return senders


class Dispatcher:
    """Delivers due messages.

    Dispatchers may run concurrently: a claimed message becomes free only after its sender was silent for minutes.
    """

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._senders = senders_for(database, settings)
        self._busy: dict[UUID, asyncio.Task[None]] = {}
        self.wake = asyncio.Event()

    async def deliver_due(self) -> int:
        """Deliver everything that is due. Return how many messages were tried."""
        total = 0
        while taken := await self.take():
            total += taken
            await asyncio.gather(*self._busy.values())
        return total

    async def take(self) -> int:
        """Claim messages for idle destinations; each destination gets its own task."""
        if len(self._busy) >= _MOST_BUSY:
            return 0
        batches: dict[UUID, list[OutboxMessage]] = defaultdict(list)
        messages = await outbox.claim(self._database, list(self._senders), busy=self._busy)
        for message in messages:
            batches[message.target_id].append(message)
        for destination, batch in batches.items():
            self._busy[destination] = asyncio.create_task(self._serve(destination, batch))
        return len(messages)

    async def close(self) -> None:
        tasks = list(self._busy.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sender in self._senders.values():
            await sender.close()

    async def _serve(self, destination: UUID, batch: list[OutboxMessage]) -> None:
        try:
            with _logged_delivery():
                if self._senders[batch[0].channel].one_by_one:
                    await self._one_by_one(batch)
                else:
                    await self._side_by_side(batch)
        finally:
            del self._busy[destination]
            self.wake.set()

    async def _one_by_one(self, batch: list[OutboxMessage]) -> None:
        for place, message in enumerate(batch, 1):
            pause = await self._deliver(message)
            if pause and batch[place:]:
                await outbox.put_off(self._database, batch[place:], pause)
                return

    async def _side_by_side(self, batch: list[OutboxMessage]) -> None:
        ends = await asyncio.gather(*(self._deliver(message) for message in batch), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    async def _deliver(self, message: OutboxMessage) -> float:
        """Deliver the message. Return for how long to pause the destination."""
        try:
            outcome = await self._senders[message.channel].send(message)
        except Unavailable:
            raise  # our own database is unavailable: the message is retried when its lease expires
        except Exception as error:
            log.error("message_failed", event_=message.event, exc_info=error)
            outcome = Undelivered(f"{type(error).__name__}: {error}")
        pause = await outbox.settle(self._database, message, outcome)
        unreachable = isinstance(outcome, Undelivered) and (outcome.after is not None or outcome.status is None)
        return pause if unreachable else 0.0


async def deliver_forever(database: Database, settings: Settings) -> None:
    async with _listening(database, Dispatcher(database, settings)) as dispatcher:
        while True:
            dispatcher.wake.clear()
            with _logged_delivery():
                while database.went_back is None and await dispatcher.take():
                    pass
            await wait_for_event(dispatcher.wake, settings.poll_seconds)


@contextlib.asynccontextmanager
async def _listening(database: Database, dispatcher: Dispatcher) -> AsyncIterator[Dispatcher]:
    listener = Listener(database, {OUTBOX: lambda _: dispatcher.wake.set()})
    await listener.start()
    try:
        yield dispatcher
    finally:
        await listener.stop()
        await dispatcher.close()


async def use_settings(database: Database, settings: Settings) -> None:
    """Send the default tenant's approvals to INTERLOCK_SLACK_CHANNEL."""
    if settings.slack_channel is None:
        return

    async def work(tx: Tx) -> None:
        tenant = await tx.row("tenant_named", DEFAULT_TENANT)
        assert tenant is not None
        await outbox.use_slack_channel(tx, tenant["id"], settings.slack_channel, "system:settings")

    await database.run_in_transaction(work)


class _logged_delivery(contextlib.AbstractContextManager[None]):  # noqa: N801
    """Log the failure of a round, so that it is retried and never ends the process."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        if isinstance(error, (Unavailable, *TRANSIENT)):
            log.warning("dispatcher_waits", error=str(error))
        else:
            log.error("dispatcher_failed", exc_info=error)
        return True
