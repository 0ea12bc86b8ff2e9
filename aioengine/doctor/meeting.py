"""How the ranks of an examination find rank 0: also when some never come or one comes twice.

Rank 0 leaves its address in the launcher's store and every rank dials it, until it proves that it
belongs to the same attempt. The store may still hold the record of a dead attempt (`--max-restarts`
keeps its port): nobody answers there any more, so ranks wait for the next record, and a new rank 0
replaces it. A rank that reads the record but cannot connect leaves a note in the store, so that
rank 0 can say which way is blocked.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

import msgspec

from aioengine.control.bootstrap import run_in_daemon_thread
from aioengine.control.channel import Connection
from aioengine.control.handshake import ControlPort, attempt_key, dial
from aioengine.doctor.messages import MAX_FRAME_BYTES, Facts
from aioengine.errors import HandshakeError, RankLostError, StartupError, StartupTimeoutError
from aioengine.handshake_messages import Endpoint, Hello

log = logging.getLogger(__name__)
T = TypeVar("T")
RECORD_KEY: Final = "doctor/rank0"
POLL_S: Final = 0.05
"""The store has no way to wait for a key to change."""
DIAL_LIMIT_S: Final = 3.0
RETRY_S: Final = 0.3
PATIENCE_S: Final = 6.0
"""For dialling one rank 0, before the rank counts as cut off from it."""
PATIENCE_SHARE: Final = 0.4
"""The same, as a share of a short start-up limit."""


class Store(Protocol):
    """The part of torch's Store that a meeting uses. Every call blocks."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


class Record(msgspec.Struct, frozen=True):
    """Where rank 0 of one attempt waits."""

    endpoint: Endpoint
    attempt: str
    secret: str
    """Empty when the job's secret comes from the environment of every rank."""

    def key(self, env_secret: bytes | None) -> bytes:
        """Of this attempt. Raises StartupError when only one side was given a secret."""
        if not self.secret and env_secret is None:
            raise StartupError("rank 0 was given AIOENGINE_JOB_SECRET and this rank was not")
        if self.secret and env_secret is not None:
            raise StartupError("this rank was given AIOENGINE_JOB_SECRET and rank 0 was not")
        return attempt_key(self.secret.encode() or env_secret or b"", self.attempt)


class Note(msgspec.Struct, frozen=True):
    """Of a rank that reached the launcher's store, but not rank 0."""

    facts: Facts
    reason: str


# --- the store: blocking functions, each run in a thread of its own ------------------------------


def wait_record(store: Store, seen: bytes, deadline: float) -> bytes | None:
    """A record other than `seen`; None at the deadline (of the monotonic clock)."""
    while time.monotonic() < deadline:
        if store.check([RECORD_KEY]) and (found := store.get(RECORD_KEY)) != seen:
            return found
        time.sleep(POLL_S)
    return None


def wait_news(store: Store, attempt: str, rank: int, seen: bytes, deadline: float) -> int | None:
    """After a note: the exit status that rank 0 of `attempt` decides on.

    None when another rank 0 has taken its place, or at the deadline.
    """
    verdict = f"doctor/{attempt}/verdict"
    while time.monotonic() < deadline:
        if store.check([verdict]):
            status = int(store.get(verdict))
            store.set(f"{verdict}/{rank}", "read")
            return status
        if store.get(RECORD_KEY) != seen:
            return None
        time.sleep(POLL_S)
    return None


def leave_note(store: Store, attempt: str, note: Note) -> None:
    text = msgspec.json.encode(note).decode()
    store.set(f"doctor/{attempt}/note/{note.facts.rank}", text)


def watch_notes(
    store: Store,
    attempt: str,
    num_ranks: int,
    stop: threading.Event,
    deliver: Callable[[Note], None],
) -> None:
    """Rank 0: hand over every rank's note of this attempt until `stop` is set."""
    silent = set(range(num_ranks))
    while not stop.wait(POLL_S):
        for rank in sorted(silent):
            key = f"doctor/{attempt}/note/{rank}"
            if store.check([key]):
                deliver(msgspec.json.decode(store.get(key), type=Note))
                silent.remove(rank)


def leave_verdict(
    store: Store, attempt: str, exit_status: int, ranks: Sequence[int], limit_s: float
) -> None:
    """For `ranks` that left notes; returns when they have read it, since the store may end with
    this process."""
    verdict, deadline = f"doctor/{attempt}/verdict", time.monotonic() + limit_s
    store.set(verdict, str(exit_status))
    while time.monotonic() < deadline and not store.check([f"{verdict}/{rank}" for rank in ranks]):
        time.sleep(POLL_S)


# --- meeting -------------------------------------------------------------------------------------


async def ask(function: Callable[..., T], *args: Any) -> T:
    """Await a blocking function of the store. Raises RankLostError when the store is gone."""
    try:
        return await run_in_daemon_thread(function, *args)
    except RuntimeError as error:  # torch's DistErrors
        raise RankLostError(f"the launcher's store does not answer any more: {error}") from None


async def take_lead(store: Store, mine: Record, env_secret: bytes | None) -> bool:
    """Whether this process is the rank 0 that others find; False when another one lives."""
    text = msgspec.json.encode(mine).decode()
    held = ""
    while True:
        found = (await ask(store.compare_set, RECORD_KEY, held, text)).decode()
        if found == text:
            return True
        if await _is_alive(decode_record(found.encode()), env_secret):
            return False
        held = found


def decode_record(raw: bytes) -> Record:
    try:
        return msgspec.json.decode(raw, type=Record)
    except msgspec.MsgspecError as error:
        raise StartupError(f"the launcher's store holds no record of a rank 0: {error}") from None


async def _is_alive(record: Record, env_secret: bytes | None) -> bool:
    try:
        (await _dial(record, 0, record.key(env_secret))).close()
    except (HandshakeError, StartupError):
        return False
    return True


async def _dial(record: Record, rank: int, key: bytes) -> Connection:
    """Raises HandshakeError, at the latest after DIAL_LIMIT_S."""
    try:
        async with asyncio.timeout(DIAL_LIMIT_S):
            return await dial(record.endpoint, rank, "member", key, MAX_FRAME_BYTES)
    except TimeoutError:
        where = f"{record.endpoint.host}:{record.endpoint.port}"
        raise HandshakeError(f"{where} did not answer in {DIAL_LIMIT_S:g} s") from None


async def reach(store: Store, record: bytes, rank: int, key: bytes, limit_s: float) -> Connection:
    """Dial rank 0 until it answers.

    Raises HandshakeError with the last reason when it does not do so for a while, or when the
    store has another record by then.
    """
    patience = min(PATIENCE_S, PATIENCE_SHARE * limit_s)
    deadline = time.monotonic() + patience
    while True:
        try:
            return await _dial(decode_record(record), rank, key)
        except HandshakeError:
            now = time.monotonic()
            if now >= deadline:
                raise
            newer = await ask(wait_record, store, record, min(deadline, now + RETRY_S))
            if newer is not None:
                raise


async def next_record(store: Store, seen: bytes, rank: int, limit_s: float) -> bytes:
    """Raises StartupTimeoutError when no rank 0 leaves a record other than `seen`."""
    found = await ask(wait_record, store, seen, time.monotonic() + limit_s)
    if found is None:
        raise StartupTimeoutError(
            f"rank {rank}: rank 0 is missing: it did not appear within --startup-timeout-seconds "
            f"{limit_s:g}. Look at its own log, and whether it was given the same MASTER_ADDR and "
            "MASTER_PORT"
        )
    return found


def reception(
    tasks: asyncio.TaskGroup, key: bytes, on_guest: Callable[[Hello, Connection], None]
) -> ControlPort:
    """A port that expects nobody in particular, and lets a rank come twice."""
    return ControlPort(
        tasks,
        key,
        max_frame_bytes=MAX_FRAME_BYTES,
        admit=lambda hello: None,
        on_guest=on_guest,
    )
