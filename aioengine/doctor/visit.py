"""One process's part in an examination, from the launcher's store to the exit status."""

import asyncio
import logging
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from aioengine.control.bootstrap import run_in_daemon_thread
from aioengine.control.channel import MemoryLink
from aioengine.control.handshake import attempt_key
from aioengine.dist.rendezvous import open_launcher_store
from aioengine.doctor.examination import Examination
from aioengine.doctor.examiner import AFTER_GATHERING_S, GOODBYE_LIMIT_S, Examiner
from aioengine.doctor.host import gather_facts, resolve
from aioengine.doctor.meeting import (
    Note,
    Record,
    Store,
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
from aioengine.doctor.patient import Patient
from aioengine.errors import (
    EngineError,
    HandshakeError,
    StartupError,
    StartupTimeoutError,
    innermost,
)
from aioengine.rank.place import Place

log = logging.getLogger(__name__)

Conclude = Callable[[Examination], int]
"""Rank 0: judge, print the report, and decide on the exit status of every rank."""
VERDICT_GRACE_S: Final = 3.0
"""Other ranks wait this much longer than rank 0 may take."""
SIGNAL_GRACE_S: Final = 5.0
"""From a signal to the end at the latest: rank 0 reports, the others wait for its verdict."""


async def visit(place: Place, environ: Mapping[str, str], conclude: Conclude) -> int:
    """Take part as this rank; returns the exit status that rank 0 decided on.

    Raises EngineError when this rank cannot take part until the end.
    """
    visitor = Visitor(place, environ, conclude)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, visitor.interrupt, number)
    limit_s = place.config.startup_timeout_seconds + AFTER_GATHERING_S + VERDICT_GRACE_S
    try:
        async with asyncio.timeout(limit_s) as visitor.limit:
            return await visitor.run()
    except TimeoutError:
        silence = f"{visitor.rank0} gave no verdict: it is stopped, or the network to it broke"
        reason = visitor.interrupted_by or silence
        raise EngineError(f"rank {place.rank}: {reason}") from None
    except ExceptionGroup as group:
        raise innermost(group) from None


class Visitor:
    """This process, until it has the verdict. Owns the ports and links that it opens."""

    limit: asyncio.Timeout
    """Of the whole visit; shortened by a signal."""

    def __init__(self, place: Place, environ: Mapping[str, str], conclude: Conclude) -> None:
        self.interrupted_by = ""
        self.rank0 = "rank 0"
        """With its address, once that is known."""
        self._place = place
        self._environ = environ
        self._conclude = conclude
        self._examiner: Examiner | None = None

    def interrupt(self, number: signal.Signals) -> None:
        """Rank 0 reports what it knows so far; the others have a moment to hear its verdict."""
        self.interrupted_by = signal.Signals(number).name
        if self._examiner is not None:
            self._examiner.guests.interrupt(self.interrupted_by)
        deadline = asyncio.get_running_loop().time() + SIGNAL_GRACE_S
        self.limit.reschedule(min(deadline, self.limit.when() or deadline))

    async def run(self) -> int:
        store = await self._open_store() if self._place.env.world_size > 1 else None
        async with asyncio.TaskGroup() as tasks:
            if self._place.rank == 0:
                status = await self._lead(tasks, store)
                if status is not None:
                    return status
            assert store is not None
            return await self._follow(tasks, store)

    async def _open_store(self) -> Store:
        limit_s = self._place.config.startup_timeout_seconds
        try:
            async with asyncio.timeout(limit_s + VERDICT_GRACE_S):
                return await self._reach_store(limit_s)
        except TimeoutError:
            env = self._place.env
            raise StartupTimeoutError(
                f"rank {env.rank}: the launcher's store at {env.master_addr}:{env.master_port} "
                f"does not answer within --startup-timeout-seconds {limit_s:g}: whoever serves it "
                "(the launcher, or rank 0) is stopped"
            ) from None

    async def _reach_store(self, limit_s: float) -> Store:
        env = self._place.env
        if env.hosts_store:
            try:
                return await run_in_daemon_thread(open_launcher_store, env, limit_s)
            except StartupError as error:
                log.info("%s", error)  # another rank 0 of this host may serve the store already
        try:
            return await run_in_daemon_thread(open_launcher_store, env, limit_s, False)
        except StartupError as error:
            addresses = await run_in_daemon_thread(resolve, env.master_addr)
            raise StartupError(
                f"{error}. On this host the name {env.master_addr} means "
                f"{', '.join(addresses) or 'nothing'}"
            ) from None

    # --- rank 0

    async def _lead(self, tasks: asyncio.TaskGroup, store: Store | None) -> int | None:
        """None when another process leads already as rank 0."""
        place, env_secret = self._place, self._place.env.job_secret
        attempt, secret = secrets.token_hex(8), env_secret or secrets.token_hex(32).encode()
        key = attempt_key(secret, attempt)
        examiner = Examiner(place.config, place.layout)
        port = reception(tasks, key, examiner.guests.on_connection)
        try:
            endpoint = await port.open(place.address)
        except OSError as error:
            raise StartupError(
                f"rank 0 cannot listen on {place.address} ({error}); --host-ip chooses the address"
            ) from None
        record = Record(endpoint, attempt, "" if env_secret else secret.decode())
        try:
            if store is not None and not await take_lead(store, record, env_secret):
                return None
            self._examiner = examiner
            return await self._examine(tasks, examiner, key, store, attempt)
        finally:
            port.close()

    async def _examine(
        self,
        tasks: asyncio.TaskGroup,
        examiner: Examiner,
        key: bytes,
        store: Store | None,
        attempt: str,
    ) -> int:
        patient = Patient(tasks, self._place, self._environ, key)
        own_end, far_end = MemoryLink.pair(asyncio.get_running_loop())
        examiner.guests.welcome(far_end, self._place.rank)
        facts = await patient.open()
        tasks.create_task(patient.attend(own_end, facts), name="rank 0 as a patient")
        notes: asyncio.Task[None] | None = None
        if store is not None:
            notes = tasks.create_task(self._take_notes(store, attempt, examiner), name="notes")
        found = await examiner.examine()
        if notes is not None:
            notes.cancel()
        status = self._conclude(found)
        if store is not None and found.cut_off:
            cut_off = [guest.facts.rank for guest in found.cut_off]
            await ask(leave_verdict, store, attempt, status, cut_off, GOODBYE_LIMIT_S)
        await examiner.dismiss(status)
        patient.close()
        return status

    async def _take_notes(self, store: Store, attempt: str, examiner: Examiner) -> None:
        """Until cancelled."""
        loop, stop = asyncio.get_running_loop(), threading.Event()

        def deliver(note: Note) -> None:
            loop.call_soon_threadsafe(examiner.guests.on_note, note)

        try:
            await ask(watch_notes, store, attempt, self._place.env.world_size, stop, deliver)
        except EngineError as error:
            log.warning("%s", error)  # who still needs the store will not come; others are here
        finally:
            stop.set()

    # --- every other rank

    async def _follow(self, tasks: asyncio.TaskGroup, store: Store) -> int:
        place, raw = self._place, b""
        while True:
            raw = await next_record(store, raw, place.rank, place.config.startup_timeout_seconds)
            status = await self._meet(tasks, store, raw)
            if status is not None:
                return status

    async def _meet(self, tasks: asyncio.TaskGroup, store: Store, raw: bytes) -> int | None:
        """The verdict of the rank 0 with this record; None when there is another one now."""
        place, record = self._place, decode_record(raw)
        self.rank0 = f"rank 0 at {record.endpoint.host}:{record.endpoint.port}"
        limit_s = place.config.startup_timeout_seconds
        try:
            key = record.key(place.env.job_secret)
        except StartupError as error:
            reason = str(error)
            facts = await run_in_daemon_thread(gather_facts, place, self._environ, None, "")
        else:
            patient = Patient(tasks, place, self._environ, key)
            facts = await patient.open()
            try:
                link = await reach(store, raw, place.rank, key, limit_s)
                return await patient.attend(link, facts)
            except HandshakeError as error:
                reason = str(error)
            finally:
                patient.close()
        log.error("does not reach rank 0: %s", reason)
        await ask(leave_note, store, record.attempt, Note(facts, reason))
        deadline = time.monotonic() + limit_s + AFTER_GATHERING_S
        return await ask(wait_news, store, record.attempt, place.rank, raw, deadline)
