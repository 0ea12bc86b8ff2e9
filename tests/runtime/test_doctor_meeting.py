"""Ranks of an examination find the rank 0 that lives, and say so when they cannot reach it."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from support.connections import HOST
from support.examinations import facts
from support.launches import DictStore

from aioengine.control.channel import Connection
from aioengine.control.handshake import attempt_key
from aioengine.doctor import meeting
from aioengine.doctor.meeting import (
    RECORD_KEY,
    Note,
    Record,
    ask,
    decode_record,
    leave_note,
    leave_verdict,
    next_record,
    reach,
    reception,
    take_lead,
    wait_news,
    watch_notes,
)
from aioengine.errors import HandshakeError, RankLostError, StartupError, StartupTimeoutError
from aioengine.handshake_messages import Endpoint, Hello

SECRET = b"secret of rank 0"
LIMIT_S = 5.0


def encoded(record: Record) -> bytes:
    return msgspec.json.encode(record)


@asynccontextmanager
async def rank_0(attempt: str) -> AsyncIterator[tuple[Record, list[Hello]]]:
    """A living rank 0 of an attempt, and who came to it."""
    hellos: list[Hello] = []

    def on_guest(hello: Hello, connection: Connection) -> None:
        hellos.append(hello)
        connection.close()

    async with asyncio.TaskGroup() as tasks:
        port = reception(tasks, attempt_key(SECRET, attempt), on_guest)
        endpoint = await port.open(HOST)
        try:
            yield Record(endpoint, attempt, SECRET.decode()), hellos
        finally:
            port.close()


async def dead_record() -> Record:
    async with rank_0("dead") as (record, _):
        return record


# --- who leads -----------------------------------------------------------------------------------


async def test_the_first_rank_0_leads_and_others_find_it() -> None:
    store = DictStore()
    async with rank_0("first") as (record, hellos):
        assert await take_lead(store, record, None)
        raw = await next_record(store, b"", 3, LIMIT_S)
        assert decode_record(raw) == record
        (await reach(store, raw, 3, record.key(None), LIMIT_S)).close()
        assert [(hello.rank, hello.role) for hello in hellos] == [(3, "member")]


async def test_a_second_rank_0_does_not_lead_while_the_first_lives() -> None:
    store = DictStore()
    async with rank_0("first") as (first, hellos), rank_0("second") as (second, _):
        assert await take_lead(store, first, None)
        assert not await take_lead(store, second, None)
        assert decode_record(store.get(RECORD_KEY)) == first
        assert [hello.rank for hello in hellos] == [0]


async def test_the_record_of_a_dead_attempt_is_replaced() -> None:
    """`--max-restarts` keeps the store and what the dead attempt wrote."""
    store = DictStore()
    store.set(RECORD_KEY, encoded(await dead_record()).decode())
    async with rank_0("new") as (record, _):
        assert await take_lead(store, record, None)
        assert decode_record(store.get(RECORD_KEY)) == record


async def test_a_rank_that_dials_a_dead_rank_0_turns_to_the_next() -> None:
    store, dead = DictStore(), await dead_record()
    store.set(RECORD_KEY, encoded(dead).decode())
    async with rank_0("new") as (record, _), asyncio.TaskGroup() as tasks:
        raw = await next_record(store, b"", 1, LIMIT_S)
        reaching = tasks.create_task(outcome_of_reach(store, raw, dead.key(None)))
        assert await take_lead(store, record, None)
        assert isinstance(await reaching, HandshakeError)
        assert decode_record(await next_record(store, raw, 1, LIMIT_S)) == record


async def outcome_of_reach(store: DictStore, raw: bytes, key: bytes) -> Exception | None:
    try:
        (await reach(store, raw, 1, key, 600.0)).close()
    except HandshakeError as error:
        return error
    return None


async def test_without_rank_0_the_rank_says_so() -> None:
    with pytest.raises(StartupTimeoutError, match="rank 2: rank 0 is missing"):
        await next_record(DictStore(), b"", 2, 0.1)


# --- secrets -------------------------------------------------------------------------------------


def test_the_secret_must_be_given_to_both_or_none() -> None:
    here = Endpoint(HOST, 1)
    with pytest.raises(StartupError, match="this rank was given AIOENGINE_JOB_SECRET"):
        Record(here, "a", "made up").key(b"from the environment")
    with pytest.raises(StartupError, match="rank 0 was given AIOENGINE_JOB_SECRET"):
        Record(here, "a", "").key(None)
    assert Record(here, "a", "").key(b"s") == Record(here, "a", "s").key(None)


async def test_another_secret_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "PATIENCE_S", 0.0)
    async with rank_0("attempt") as (record, hellos):
        key = attempt_key(b"another secret", "attempt")
        with pytest.raises(HandshakeError, match="does not belong to this attempt"):
            await reach(DictStore(), encoded(record), 1, key, LIMIT_S)
        assert hellos == []


# --- notes ---------------------------------------------------------------------------------------


async def test_notes_reach_rank_0_and_the_verdict_their_writers() -> None:
    store = DictStore()
    raw = b"record"
    store.set(RECORD_KEY, raw.decode())
    notes: asyncio.Queue[Note] = asyncio.Queue()
    loop, stop = asyncio.get_running_loop(), threading.Event()

    def deliver(note: Note) -> None:
        loop.call_soon_threadsafe(notes.put_nowait, note)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask(watch_notes, store, "attempt", 4, stop, deliver))
        news = {}
        for rank in (3, 1):
            note = Note(facts(rank), f"reason of {rank}")
            await ask(leave_note, store, "attempt", note)
            assert await notes.get() == note
            deadline = time.monotonic() + LIMIT_S
            news[rank] = tasks.create_task(ask(wait_news, store, "attempt", rank, raw, deadline))
        await ask(leave_verdict, store, "attempt", 1, [1, 3], LIMIT_S)
        stop.set()
    assert [task.result() for task in news.values()] == [1, 1]


async def test_a_cut_off_rank_turns_to_the_next_rank_0() -> None:
    store = DictStore()
    store.set(RECORD_KEY, "new record")
    deadline = time.monotonic() + LIMIT_S
    assert await ask(wait_news, store, "attempt", 1, b"old record", deadline) is None


async def test_a_store_that_is_gone_is_an_error_of_ours() -> None:
    def broken() -> None:
        raise RuntimeError("Connection reset")

    with pytest.raises(RankLostError, match="store does not answer any more: Connection reset"):
        await ask(broken)


def test_what_is_no_record_is_refused() -> None:
    with pytest.raises(StartupError, match="no record"):
        decode_record(b"[]")
