"""Who is there: every rank finds rank 0, proves itself, and learns where the leaders are.

The launcher's store may still hold the keys of an attempt that died (`--max-restarts` keeps its
port), so nothing in it is believed by its name alone. Each rank writes a fresh random id under its
rank number and waits for the answer *to that id*; rank 0 watches the numbers and answers each id
it has not seen with its own fresh address, attempt id and job secret. Everything after that goes
over connections that know the secret. The store is not touched once all ranks have come.
"""

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from aioengine.config import EngineConfig, config_differences
from aioengine.control.channel import Connection
from aioengine.control.deadline import VERDICT_GRACE_S, Deadline
from aioengine.control.handshake import Listener, attempt_key, dial, receive_message
from aioengine.errors import HandshakeError, StartupError, StartupTimeoutError
from aioengine.handshake_messages import Endpoint, Member, Refused, Role, Roster

log = logging.getLogger(__name__)
T = TypeVar("T")
Seat = tuple[Role, int]
"""A connection that a listener expects: the dialling rank and its role."""
MakeEntry = Callable[[Endpoint | None], Member]
POLL_S = 0.05
"""The store has no way to wait for a key to change."""


class KeyValueStore(Protocol):
    """The part of torch's Store that the bootstrap uses. Every call blocks."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


class Answer(msgspec.Struct, frozen=True):
    """Rank 0's reply in the store to one fresh id."""

    endpoint: Endpoint
    attempt: str
    secret: str
    """Empty when the job's secret comes from the environment of every rank."""
    left_s: float
    """What rank 0 has left of the start-up limit."""


async def run_in_daemon_thread(function: Callable[..., T], *args: Any) -> T:
    """Await a blocking call in a thread that never delays the exit of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # T when there is no error

    def run() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = (function(*args), None)
        except BaseException as error:  # handed to whoever awaits
            outcome = (None, error)
        loop.call_soon_threadsafe(finish, *outcome)

    threading.Thread(target=run, name=function.__name__, daemon=True).start()
    return await future


# --- the store: blocking functions, each run in a thread of its own ----------------------------


def find_rank0(
    store: KeyValueStore, rank: int, deadline: Deadline, env_secret: bytes | None
) -> Answer:
    """Announce this rank under a fresh id and wait until rank 0 answers it."""
    fresh = secrets.token_hex(16)
    store.set(f"hello/{rank}", fresh)
    answer_key = f"answer/{rank}/{fresh}"
    while not store.check([answer_key]):
        if not deadline.left_s:
            raise StartupTimeoutError(
                f"rank {rank}: rank 0 did not answer within --startup-timeout-seconds "
                f"{deadline.limit_s:g}; it is not running, is stopped, or does not reach the same "
                "rendezvous host and port"
            )
        time.sleep(POLL_S)
    answer = msgspec.json.decode(store.get(answer_key), type=Answer)
    if not answer.secret and env_secret is None:
        raise StartupError(
            f"rank {rank}: rank 0 was given AIOENGINE_JOB_SECRET and this rank was not"
        )
    if answer.secret and env_secret is not None:
        raise StartupError(
            f"rank {rank}: this rank was given AIOENGINE_JOB_SECRET and rank 0 was not"
        )
    return answer


def answer_hellos(
    store: KeyValueStore,
    num_ranks: int,
    make_answer: Callable[[], Answer],
    stop: threading.Event,
) -> None:
    """Rank 0: answer every fresh id under ranks 1 … num_ranks − 1 until `stop` is set."""
    answered: dict[int, str] = {}
    while not stop.is_set():
        for rank in range(1, num_ranks):
            if not store.check([f"hello/{rank}"]):
                continue
            fresh = store.get(f"hello/{rank}").decode()
            if answered.get(rank) != fresh:
                text = msgspec.json.encode(make_answer()).decode()
                store.set(f"answer/{rank}/{fresh}", text)
                answered[rank] = fresh
        stop.wait(POLL_S)


# --- joining -----------------------------------------------------------------------------------


class Bootstrap:
    """One rank's way into the launch: `join` returns the roster, then the links are dialled.

    Owns the listener of rank 0 and of leaders until `close`.
    """

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        config: EngineConfig,
        *,
        rank: int,
        num_ranks: int,
        job_secret: bytes | None,
        address: str,
        max_frame_bytes: int,
        deadline: Deadline,
    ) -> None:
        self._tasks = tasks
        self._config = config
        self._rank = rank
        self._num_ranks = num_ranks
        self._env_secret = job_secret
        self._address = address
        self._deadline = deadline
        self.key = b""
        """Of this attempt, once `join` has returned: every control port asks for it."""
        self._max_frame_bytes = max_frame_bytes
        self._listener: Listener | None = None

    async def join(
        self, store: KeyValueStore | None, entry: MakeEntry, seats: Sequence[Seat]
    ) -> Roster:
        """Wait until every rank has come and return the roster, indexed by rank.

        `entry` makes this rank's member entry, given where it listens; `seats` are the (role, rank)
        that will dial this one (none unless it leads). One rank alone needs no store.
        Raises StartupTimeoutError that names the missing ranks and the hosts seen, StartupError
        that lists the settings in which ranks differ.
        """
        if self._rank == 0:
            return await self._gather(store, entry, seats)
        assert store is not None
        return await self._enter(store, entry, seats)

    async def dial(self, member: Member, role: Role) -> Connection:
        """Connect to a leader of the roster."""
        assert member.endpoint is not None
        try:
            async with self._deadline.bound(VERDICT_GRACE_S):
                return await dial(
                    member.endpoint, self._rank, role, self.key, self._max_frame_bytes
                )
        except TimeoutError:
            raise StartupTimeoutError(
                f"{member.info} does not take the connection of rank {self._rank} within "
                f"--startup-timeout-seconds {self._deadline.limit_s:g}; look at that rank's own "
                "log, and whether its process is stopped"
            ) from None

    async def accept(self, role: Role, rank: int) -> Connection:
        """The connection that `rank` dials to this leader."""
        assert self._listener is not None
        try:
            async with self._deadline.bound():
                return await self._listener.wait_accepted(role, rank)
        except TimeoutError:
            raise StartupTimeoutError(
                f"rank {rank} did not connect as {role} to its leader, rank {self._rank}, within "
                f"--startup-timeout-seconds {self._deadline.limit_s:g}"
            ) from None

    def close(self) -> None:
        """Stop listening: every expected connection is there."""
        if self._listener is not None:
            self._listener.close()

    # --- rank 0

    async def _gather(
        self, store: KeyValueStore | None, entry: MakeEntry, seats: Sequence[Seat]
    ) -> Roster:
        attempt = secrets.token_hex(8)
        secret = self._env_secret or secrets.token_hex(32).encode()
        self.key = attempt_key(secret, attempt)
        others: list[Seat] = [("member", rank) for rank in range(1, self._num_ranks)]
        self._listener = self._new_listener([*others, *seats])
        endpoint = await self._listener.open(self._address)
        members = [entry(endpoint)]
        if store is None:
            return Roster(members=tuple(members))
        handed_out = "" if self._env_secret else secret.decode()
        stop = threading.Event()
        answering = self._tasks.create_task(
            run_in_daemon_thread(
                answer_hellos,
                store,
                self._num_ranks,
                lambda: Answer(endpoint, attempt, handed_out, self._deadline.left_s),
                stop,
            ),
            name="answer hellos",
        )
        connections: list[Connection] = []
        try:
            async with self._deadline.bound():
                for _, rank in others:
                    connections.append(await self._listener.wait_accepted("member", rank))
                    members.append(await self._read_entry(connections[-1], rank))
            self._compare_configs(members)
        except TimeoutError:
            error = StartupTimeoutError(self._describe_missing(members))
            await self._refuse(str(error))
            raise error from None
        except StartupError as error:
            await self._refuse(str(error))
            raise
        except asyncio.CancelledError:
            answering.cancel()  # its thread may be stuck: whoever serves the store may be stopped
            raise
        finally:
            stop.set()
            await answering
        slim = tuple(msgspec.structs.replace(member, config=b"") for member in members)
        for connection in connections:
            connection.send(Roster(members=slim))
            await connection.flush()
            connection.close()
        return Roster(members=slim)

    async def _read_entry(self, connection: Connection, rank: int) -> Member:
        try:
            member = await receive_message(connection)
        except HandshakeError as error:
            raise StartupError(f"rank {rank} left while ranks were gathering: {error}") from None
        if not isinstance(member, Member) or member.info.rank != rank:
            raise StartupError(f"rank {rank} sent {type(member).__name__} instead of its entry")
        return member

    def _compare_configs(self, members: list[Member]) -> None:
        for member in members[1:]:
            theirs = msgspec.json.decode(member.config, type=EngineConfig)
            if differences := config_differences(self._config, theirs):
                raise StartupError(f"rank 0 and {member.info} differ in {'; '.join(differences)}")

    async def _refuse(self, reason: str) -> None:
        """Tell every rank that did come why there will be no roster."""
        assert self._listener is not None
        for connection in self._listener.accepted("member"):
            connection.send(Refused(reason))
            await connection.flush()
            connection.close()

    def _describe_missing(self, members: list[Member]) -> str:
        assert self._listener is not None
        missing = ", ".join(map(str, self._listener.missing("member")))
        unread = self._listener.accepted("member")[len(members) - 1 :]
        addresses = {connection.peer.rpartition(":")[0] for connection in unread}
        hosts = ", ".join(sorted(addresses | {member.info.host for member in members}))
        return (
            f"rank {missing} of {self._num_ranks} did not arrive within --startup-timeout-seconds "
            f"{self._deadline.limit_s:g}; hosts seen so far: {hosts}. Look at the missing rank's "
            "own log, whether its process is stopped, and whether its host reaches the rendezvous "
            "host"
        )

    # --- every other rank

    async def _enter(self, store: KeyValueStore, entry: MakeEntry, seats: Sequence[Seat]) -> Roster:
        answer = await self._ask_rank0(store)
        secret = answer.secret.encode() or self._env_secret
        assert secret is not None
        self.key = attempt_key(secret, answer.attempt)
        endpoint = None
        if seats:
            self._listener = self._new_listener(seats)
            endpoint = await self._listener.open(self._address)
        try:
            async with self._deadline.bound(VERDICT_GRACE_S):  # rank 0 reports first, unless frozen
                return await self._wait_roster(answer.endpoint, entry(endpoint))
        except TimeoutError:
            raise StartupTimeoutError(
                f"rank {self._rank}: rank 0 at {answer.endpoint.host}:{answer.endpoint.port} "
                "answered this rank and then said nothing within --startup-timeout-seconds "
                f"{self._deadline.limit_s:g}; look at rank 0's own log, and whether its process "
                "is stopped"
            ) from None

    async def _ask_rank0(self, store: KeyValueStore) -> Answer:
        """Rank 0's answer to this rank. From then on both follow rank 0's clock."""
        try:
            async with self._deadline.bound(VERDICT_GRACE_S):
                answer = await run_in_daemon_thread(
                    find_rank0, store, self._rank, self._deadline, self._env_secret
                )
        except TimeoutError:
            raise StartupTimeoutError(
                f"rank {self._rank}: the launcher's store does not answer within "
                f"--startup-timeout-seconds {self._deadline.limit_s:g}; whoever serves it (the "
                "launcher, or rank 0) is stopped or unreachable"
            ) from None
        self._deadline.adopt(answer.left_s)
        return answer

    async def _wait_roster(self, rank0: Endpoint, entry: Member) -> Roster:
        """Announce this rank to rank 0 and wait for the verdict."""
        connection = await dial(rank0, self._rank, "member", self.key, self._max_frame_bytes)
        try:
            connection.send(entry)
            roster = await receive_message(connection)
        except HandshakeError as error:
            raise StartupError(f"rank 0 left while ranks were gathering: {error}") from None
        finally:
            connection.close()
        if isinstance(roster, Refused):
            raise StartupError(roster.reason)
        assert isinstance(roster, Roster)
        return roster

    def _new_listener(self, seats: Sequence[Seat]) -> Listener:
        return Listener(self._tasks, self.key, seats, self._max_frame_bytes)
