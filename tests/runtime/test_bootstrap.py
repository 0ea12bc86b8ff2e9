"""Ranks find rank 0 through a store, prove themselves, and get one roster."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from support.connections import MAX_FRAME_BYTES, raw_dial
from support.launches import CONFIG, BootstrapRank, DictStore, info, outcomes

from aioengine.control.bootstrap import Answer, answer_hellos, run_in_daemon_thread
from aioengine.control.channel import frame
from aioengine.control.handshake import attempt_key, dial
from aioengine.errors import HandshakeError, StartupError, StartupTimeoutError
from aioengine.handshake_messages import Endpoint, Roster
from aioengine.messages import Shutdown

SHORT = msgspec.structs.replace(CONFIG, startup_timeout_seconds=0.3)
SECRET = b"job secret"


def launch(num_ranks: int, store: DictStore | None = None) -> list[BootstrapRank]:
    store = store or DictStore()
    return [BootstrapRank(rank, num_ranks, store) for rank in range(num_ranks)]


def check_rosters(rosters: list[Roster | BaseException], num_ranks: int) -> None:
    first = rosters[0]
    assert isinstance(first, Roster), first
    assert all(roster == first for roster in rosters), rosters
    assert [member.info for member in first.members] == [info(rank) for rank in range(num_ranks)]


# --- all come ------------------------------------------------------------------------------------


async def test_one_rank_alone_needs_no_store() -> None:
    check_rosters(await outcomes([BootstrapRank(0, 1, None)]), 1)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
async def test_all_ranks_get_the_same_roster(num_ranks: int) -> None:
    check_rosters(await outcomes(launch(num_ranks)), num_ranks)


@pytest.mark.parametrize("order", [(2, 1, 0), (0, 2, 1), (1, 0, 2)])
async def test_ranks_may_come_in_any_order(order: tuple[int, ...]) -> None:
    """Each starts once the one before has announced itself."""
    store = DictStore()
    ranks = launch(3, store)
    async with asyncio.TaskGroup() as tasks:
        running = {}
        for rank in order:
            running[rank] = tasks.create_task(ranks[rank].outcome())
            if rank:
                await store.wait_set(f"hello/{rank}")
    check_rosters([running[rank].result() for rank in range(3)], 3)


async def test_a_secret_from_the_environment_stays_out_of_the_store() -> None:
    store = DictStore()
    ranks = launch(3, store)
    for rank in ranks:
        rank.secret = SECRET
    check_rosters(await outcomes(ranks), 3)
    answers = [value for key, value in store.values.items() if key.startswith("answer/")]
    assert len(answers) == 2
    assert all(msgspec.json.decode(value, type=Answer).secret == "" for value in answers)
    assert not any(SECRET in value for value in store.values.values())


async def test_leaders_are_found_through_the_roster() -> None:
    """Ranks 0 and 2 lead; 1 and 3 follow; rank 0 carries the front end."""
    ranks = launch(4)
    ranks[0].seats = [("peer", 1)]
    ranks[2].seats = [("peer", 3), ("front_end", 0)]
    all_linked = asyncio.Barrier(4)

    async def lead(rank: BootstrapRank) -> None:
        async with rank.joined() as (bootstrap, roster):
            links = []
            if rank.rank == 0:
                links.append(await bootstrap.dial(roster.members[2], "front_end"))
            links += [await bootstrap.accept(role, seat) for role, seat in rank.seats]
            await all_linked.wait()
            for link in links:
                link.send(Shutdown())
                link.close()

    async def follow(rank: BootstrapRank) -> None:
        async with rank.joined() as (bootstrap, roster):
            link = await bootstrap.dial(roster.members[rank.rank - 1], "peer")
            await all_linked.wait()
            assert await link.receive() == frame(Shutdown())[4:]
            link.close()

    async with asyncio.TaskGroup() as tasks:
        for rank in ranks:
            tasks.create_task(lead(rank) if rank.seats else follow(rank))


async def test_a_leader_names_the_peer_that_does_not_dial() -> None:
    rank = BootstrapRank(0, 1, None, config=SHORT, seats=[("peer", 1)])
    with pytest.RaisesGroup(
        pytest.RaisesExc(StartupTimeoutError, match="rank 1 did not connect as peer.*rank 0")
    ):
        async with rank.joined() as (bootstrap, _):
            await bootstrap.accept("peer", 1)


# --- traces of an attempt that died --------------------------------------------------------------


async def test_keys_of_an_earlier_attempt_do_no_harm() -> None:
    """The store outlives an attempt: `--max-restarts` keeps its port."""
    store = DictStore()
    check_rosters(await outcomes(launch(3, store)), 3)
    check_rosters(await outcomes(launch(3, store)), 3)


async def test_ranks_that_come_before_the_new_rank_0_wait_for_its_answer() -> None:
    """They see what the dead rank 0 answered to their predecessors, and do not take it."""
    store = DictStore()
    dead = Answer(Endpoint("127.0.0.1", 1), "dead attempt", "dead secret", left_s=0.0)
    for rank in (1, 2):
        store.set(f"hello/{rank}", "before")
        store.set(f"answer/{rank}/before", msgspec.json.encode(dead).decode())
    ranks = launch(3, store)
    async with asyncio.TaskGroup() as tasks:
        running = {rank: tasks.create_task(ranks[rank].outcome()) for rank in (1, 2)}
        for rank in (1, 2):
            await store.wait_set(f"hello/{rank}", after=b"before")
        running[0] = tasks.create_task(ranks[0].outcome())
    check_rosters([running[rank].result() for rank in range(3)], 3)


async def test_a_dead_rank_whose_hello_is_answered_is_told_from_its_successor() -> None:
    """Rank 0 is first, answers the hello that is there, and then the rank itself comes."""
    store = DictStore()
    async with rank_0_that_answered(store, 2) as (first, _):
        second = await BootstrapRank(1, 2, store).outcome()
    check_rosters([first.result(), second], 2)


async def test_a_member_of_another_attempt_is_not_let_in() -> None:
    """Not even with the job's secret: the attempt is part of the key."""
    store = DictStore()
    async with rank_0_that_answered(store, 2, SECRET) as (first, answer):
        key = attempt_key(SECRET, "an earlier attempt")
        with pytest.raises(HandshakeError, match="does not belong to this attempt"):
            await dial(answer.endpoint, 1, "member", key, MAX_FRAME_BYTES)
        second = await BootstrapRank(1, 2, store, secret=SECRET).outcome()
    check_rosters([first.result(), second], 2)


@asynccontextmanager
async def rank_0_that_answered(
    store: DictStore, num_ranks: int, secret: bytes | None = None
) -> AsyncIterator[tuple["asyncio.Task[Roster | BaseException]", Answer]]:
    """Rank 0 gathers and has answered a rank 1 of which nothing is left but its hello."""
    store.set("hello/1", "dead")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(BootstrapRank(0, num_ranks, store, secret=secret).outcome())
        answer = await store.wait_set("answer/1/dead")
        yield running, msgspec.json.decode(answer, type=Answer)


# --- what goes wrong -----------------------------------------------------------------------------


async def test_every_rank_that_came_names_the_missing_ones() -> None:
    ranks = launch(5)
    for rank in ranks:
        rank.config = SHORT
    errors = await outcomes([ranks[0], ranks[1], ranks[3]])
    for error in errors:
        assert isinstance(error, StartupError)
        assert "rank 2, 4 of 5 did not arrive" in str(error)
        assert "--startup-timeout-seconds 0.3" in str(error)
        assert "host0" in str(error)
        assert "host1" in str(error)
    assert isinstance(errors[0], StartupTimeoutError)


async def test_ranks_without_rank_0_say_so() -> None:
    ranks = launch(3)
    for rank in ranks:
        rank.config = SHORT
    for number, error in zip((1, 2), await outcomes(ranks[1:]), strict=True):
        assert isinstance(error, StartupTimeoutError)
        assert f"rank {number}: rank 0 did not answer" in str(error)
        assert "--startup-timeout-seconds" in str(error)


async def test_settings_in_which_ranks_differ_are_listed_on_every_rank() -> None:
    ranks = launch(3)
    ranks[2].config = msgspec.structs.replace(CONFIG, block_size=32, dtype="float16", host_ip="::1")
    for error in await outcomes(ranks):
        assert isinstance(error, StartupError)
        assert "block_size: 16 != 32" in str(error)
        assert "dtype: 'auto' != 'float16'" in str(error)
        assert "host_ip" not in str(error)
        assert str(info(2)) in str(error)


async def test_settings_of_one_rank_may_differ() -> None:
    ranks = launch(2)
    ranks[1].config = msgspec.structs.replace(CONFIG, host_ip="::1", log_dir="x", log_level="error")
    check_rosters(await outcomes(ranks), 2)


async def test_a_secret_that_only_rank_0_has() -> None:
    ranks = launch(2)
    ranks[0].config = SHORT
    ranks[0].secret = SECRET
    first, second = await outcomes(ranks)
    assert isinstance(second, StartupError)
    assert "rank 0 was given AIOENGINE_JOB_SECRET and this rank was not" in str(second)
    assert isinstance(first, StartupTimeoutError)
    assert "rank 1 of 2 did not arrive" in str(first)


async def test_two_secrets() -> None:
    ranks = launch(2)
    ranks[0].config = SHORT
    ranks[0].secret, ranks[1].secret = SECRET, b"another"
    first, second = await outcomes(ranks)
    assert isinstance(second, HandshakeError)
    assert "does not belong to this attempt" in str(second)
    assert isinstance(first, StartupTimeoutError)


async def test_a_rank_that_leaves_while_others_gather_ends_the_launch() -> None:
    async with rank_0_that_answered(DictStore(), 3) as (first, answer):
        key = attempt_key(answer.secret.encode(), answer.attempt)
        (await dial(answer.endpoint, 1, "member", key, MAX_FRAME_BYTES)).close()
    error = first.result()
    assert isinstance(error, StartupError)
    assert "rank 1 left while ranks were gathering" in str(error)


async def test_strangers_at_rank_0_do_no_harm() -> None:
    store = DictStore()
    async with (
        rank_0_that_answered(store, 2) as (first, answer),
        raw_dial(answer.endpoint) as silent,
        raw_dial(answer.endpoint) as rude,
    ):
        rude.writer.write(b"GET / HTTP/1.1\r\n\r\n")
        second = await BootstrapRank(1, 2, store).outcome()
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await silent.receive()
    check_rosters([first.result(), second], 2)


class FrozenStore(DictStore):
    """Answers nothing until `thaw` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.thaw = threading.Event()
        self._loop = asyncio.get_running_loop()

    def check(self, keys: list[str]) -> bool:
        self._loop.call_soon_threadsafe(self.asked.set)
        return self.thaw.wait()


async def test_rank_0_is_asked_to_end_while_the_store_is_frozen() -> None:
    store = FrozenStore()
    async with asyncio.timeout(CONFIG.startup_timeout_seconds / 2), asyncio.TaskGroup() as tasks:
        gathering = tasks.create_task(BootstrapRank(0, 2, store).outcome())
        await store.asked.wait()
        gathering.cancel()
    store.set("hello/1", "")
    store.thaw.set()
    for thread in threading.enumerate():  # left behind, it tells this loop when it ends
        if thread.name == answer_hellos.__name__:
            await asyncio.to_thread(thread.join)  # noqa: TID251


# --- the thread that waits -----------------------------------------------------------------------


async def test_a_call_in_a_daemon_thread_returns_or_raises() -> None:
    assert await run_in_daemon_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await run_in_daemon_thread(divmod, 7, 0)


async def test_nobody_waits_for_a_daemon_thread_once_its_call_was_given_up() -> None:
    store = DictStore()
    store.lock.acquire()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await run_in_daemon_thread(store.check, ["key"])
    store.lock.release()
    await run_in_daemon_thread(store.check, ["key"])
