"""Who came to an examination, and what they answer: rank 0's connections."""

import asyncio
import functools
import time
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

import msgspec

from aioengine.config import EngineConfig, config_differences
from aioengine.control.channel import Connection, Link
from aioengine.doctor.examination import Clock, CutOff, Examination, Person, Unheard
from aioengine.doctor.meeting import Note
from aioengine.doctor.messages import (
    Answer,
    Claim,
    Device,
    Dialled,
    Facts,
    Measured,
    Ping,
    Pong,
    StoreOpened,
    Verdict,
)
from aioengine.handshake_messages import Hello

NUM_EXCHANGES: Final = 8
"""Of time stamps with each rank."""
Reply = TypeVar("Reply", Dialled, StoreOpened, Measured)


class Guest:
    """One process that came; it has claimed a rank."""

    def __init__(self, link: Link, person: Person) -> None:
        self.link = link
        self.person = person
        self.doing = ""
        """What its device thread was in, when it last said so."""
        self.num_pongs = 0
        self.is_measuring = False
        """Its device thread was asked for something that it has not answered."""
        self.replies: dict[type, Answer] = {}
        self._ping = -1
        self._pinged_ns = 0

    @property
    def facts(self) -> Facts:
        return self.person.facts

    @property
    def rank(self) -> int:
        return self.facts.rank

    @property
    def is_gone(self) -> bool:
        return bool(self.person.left)

    @property
    def is_able(self) -> bool:
        """Here, and has answered whatever it was asked."""
        return not self.is_gone and not self.person.silent_in

    def ping(self, number: int) -> None:
        """Number 0 begins a series of exchanges, the last number is a single one."""
        self._ping, self._pinged_ns = number, time.time_ns()
        self.link.send(Ping(number))

    def on_answer(self, answer: Answer) -> None:
        if isinstance(answer, Pong):
            self._on_pong(answer)
        elif isinstance(answer, Device):
            self.person.device = answer
        else:
            self.replies[type(answer)] = answer

    def _on_pong(self, pong: Pong) -> None:
        """Clock filter of RFC 5905, section 10: the exchange with the least delay counts."""
        if pong.number != self._ping:
            return  # to a ping that was given up
        now_ns = time.time_ns()
        delay_ms = (now_ns - self._pinged_ns - (pong.sent_ns - pong.received_ns)) / 1e6
        offset_ms = (pong.received_ns - self._pinged_ns + pong.sent_ns - now_ns) / 2e6
        best = self.person.clock
        if best is None or delay_ms / 2 < best.error_ms:
            self.person.clock = Clock(
                offset_ms=round(offset_ms, 3), error_ms=round(delay_ms / 2, 3)
            )
        self.num_pongs += 1
        self.doing = pong.doing
        if pong.number + 1 < NUM_EXCHANGES:
            self.ping(pong.number + 1)


class Guests:
    """All of them. Enters who came into the examination, and waits for what they say."""

    def __init__(self, config: EngineConfig, found: Examination, end: float) -> None:
        self._config = config
        self._found = found
        self._began = time.monotonic()
        self._end = end
        """No wait lasts longer (monotonic clock)."""
        self._changed = asyncio.Event()
        self._links: dict[Link, Guest | None] = {}
        """None for a connection over which nobody has claimed a rank yet."""
        self._is_dismissed = False
        """From then on nobody is expected to stay."""
        self.by_rank: dict[int, Guest] = {}
        """Who came first under each rank."""

    # --- what happens meanwhile

    def on_connection(self, hello: Hello, connection: Connection) -> None:
        if hello.role == "member":
            self._found.unheard[hello.rank] = Unheard(connection.peer.rpartition(":")[0])
            self.welcome(connection, hello.rank)
        else:
            connection.close()

    def welcome(self, link: Link, rank: int) -> None:
        self._links[link] = None
        link.start(
            Answer,
            functools.partial(self._on_answer, link),
            functools.partial(self._on_closed, link, rank),
        )

    def on_note(self, note: Note) -> None:
        """A rank cannot reach this one."""
        self._found.cut_off.append(CutOff(facts=note.facts, reason=note.reason))
        self._changed.set()

    def interrupt(self, reason: str) -> None:
        """Whatever is being waited for is given up; what is known is reported."""
        self._found.interrupted = self._found.interrupted or reason
        self._changed.set()

    def _on_answer(self, link: Link, answer: Answer) -> None:
        guest = self._links.get(link)
        if isinstance(answer, Claim) and guest is None:
            self._links[link] = self._enter(link, answer)
        elif guest is not None:
            guest.on_answer(answer)
        self._changed.set()

    def _enter(self, link: Link, claim: Claim) -> Guest:
        facts, found = claim.facts, self._found
        found.unheard.pop(facts.rank, None)
        person = Person(
            facts=facts,
            arrived_s=round(time.monotonic() - self._began, 2),
            differences=self._differences(claim.config),
        )
        guest = Guest(link, person)
        if facts.world_size != found.world_size:
            found.strays.append(person)
        elif facts.rank in found.ranks:
            found.again.append(person)
        else:
            found.ranks[facts.rank] = person
            self.by_rank[facts.rank] = guest
        return guest

    def _differences(self, config: bytes) -> tuple[str, ...]:
        try:
            theirs = msgspec.json.decode(config, type=EngineConfig)
        except msgspec.MsgspecError as error:  # of another version
            return (f"unreadable settings ({error})",)
        return tuple(config_differences(self._config, theirs))

    def _on_closed(self, link: Link, rank: int, reason: str) -> None:
        guest = self._links.pop(link)
        if self._is_dismissed:
            pass
        elif guest is not None:
            guest.person.left = reason
        elif rank in self._found.unheard:
            self._found.unheard[rank].reason = reason
        self._changed.set()

    # --- waiting

    def able(self) -> list[Guest]:
        """By rank."""
        return [guest for _, guest in sorted(self.by_rank.items()) if guest.is_able]

    async def wait(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Whether it came true before the limit, the end of the run, or an interruption."""
        limit_s = min(limit_s, self._end - time.monotonic())
        try:
            async with asyncio.timeout(max(0.0, limit_s)):
                while not condition() and not self._found.interrupted:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        return condition()

    async def replies(
        self, guests: list[Guest], kind: type[Reply], limit_s: float
    ) -> dict[int, Reply]:
        """By rank, of those that reply in time."""
        await self.wait(lambda: all(kind in g.replies or g.is_gone for g in guests), limit_s)
        found = {guest.rank: guest.replies.get(kind) for guest in guests}
        return {rank: reply for rank, reply in found.items() if isinstance(reply, kind)}

    def mark_silent(self, guests: Iterable[Guest], where: str) -> None:
        """They did not answer; nobody's fault when the run was interrupted."""
        for guest in guests:
            if guest.is_able and not self._found.interrupted:
                guest.person.silent_in = where

    async def dismiss(self, exit_status: int, limit_s: float) -> list[Guest]:
        """Tell everybody the verdict, and wait until they have read it and left.

        Returns those that did not.
        """
        self._is_dismissed = True
        for link in list(self._links):
            link.send(Verdict(exit_status))
        try:
            async with asyncio.timeout(limit_s):
                while self._links:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            staying = [guest for guest in self._links.values() if guest is not None]
            for link in list(self._links):
                link.close()
            return staying
        return []
