"""How a generation's reader hears of what steps bring: at once, or merged while it is behind."""

import asyncio

import pytest
from support.fake_leaders import FakeLeader, front_end_with_leaders, sample
from support.mailbox import settle
from support.tiny_model import detokenizer, ids

from aioengine.errors import RequestFailedError
from aioengine.frontend.front_end import FrontEnd
from aioengine.frontend.records import MAX_IDS_WITHOUT_TEXT, ChoiceSpec, Update
from aioengine.messages import AddRequest, ChoiceParams, RequestDelta


class Reader:
    """A sink that a test makes slow."""

    def __init__(self) -> None:
        self.writes: list[list[str]] = []
        self.caught_up = asyncio.Event()
        self.caught_up.set()
        self.error: Exception | None = None

    def write(self, updates: list[Update]) -> bool:
        if updates:
            self.writes.append([update.text for update in updates])
            if self.error is not None:
                raise self.error
        return self.caught_up.is_set()

    async def drain(self) -> None:
        await self.caught_up.wait()


def spec() -> ChoiceSpec:
    params = ChoiceParams(max_tokens=50)
    return ChoiceSpec(prompt_ids=ids("abc"), params=params, detokenizer=detokenizer())


async def serving() -> tuple[FrontEnd, FakeLeader]:
    front_end, (leader,) = front_end_with_leaders(1)
    leader.ready()
    await settle()
    return front_end, leader


def step(leader: FakeLeader, added: list[AddRequest], text: str, *, is_last: bool = False) -> None:
    """One report with a delta for each request."""
    reason = "length" if is_last else None
    leader.report(*(RequestDelta(each.request_id, ids(text), (), reason) for each in added))


async def test_a_step_is_one_write_in_the_callback_that_brings_it() -> None:
    front_end, leader = await serving()
    reader = Reader()
    async with front_end.generate([spec(), spec()]) as generation, asyncio.TaskGroup() as tasks:
        added = await leader.added(2)
        feeding = tasks.create_task(generation.feed(reader))
        await settle()
        for text in ("he", "llo"):
            step(leader, added, text)
            await settle()
        assert reader.writes == [["he", "he"], ["llo", "llo"]]
        assert not feeding.done()
        step(leader, added, "!", is_last=True)
    assert reader.writes[2:] == [["!", "!"]]


async def test_what_comes_while_the_reader_is_behind_merges() -> None:
    front_end, leader = await serving()
    reader = Reader()
    async with front_end.generate([spec()]) as generation, asyncio.TaskGroup() as tasks:
        added = await leader.added()
        tasks.create_task(generation.feed(reader))
        await settle()
        reader.caught_up.clear()
        for text in "abcdef":
            step(leader, added, text)
            await settle()
        num_written = len(reader.writes)
        assert num_written <= 2  # the one that showed it, and what came until that was seen
        reader.caught_up.set()
        step(leader, added, "g", is_last=True)
    assert "".join(text for write in reader.writes for text in write) == "abcdefg"
    assert len(reader.writes) <= num_written + 2


async def test_a_sink_that_raises_ends_its_reader_only() -> None:
    front_end, leader = await serving()
    broken, sound = Reader(), Reader()
    broken.error = ZeroDivisionError("of the sink")
    async with front_end.generate([spec()]) as first, front_end.generate([spec()]) as second:
        added = await leader.added(2)
        async with asyncio.TaskGroup() as tasks:
            failing = tasks.create_task(raised_by(first.feed(broken)))
            tasks.create_task(second.feed(sound))
            await settle()
            step(leader, added, "x")
            await settle()
            assert isinstance(failing.result(), ZeroDivisionError)
            step(leader, added, "y", is_last=True)
    assert sound.writes == [["x"], ["y"]]


async def raised_by(feeding: object) -> BaseException | None:
    try:
        await feeding  # type: ignore[misc]
    except ZeroDivisionError as error:
        return error
    return None


async def test_a_failure_comes_after_what_was_before_it() -> None:
    front_end, leader = await serving()
    reader = Reader()
    async with front_end.generate([spec(), spec()]) as generation:
        added = await leader.added(2)
        step(leader, added, "x")
        leader.answer(added[1], (), "error", error="no memory")
        with pytest.raises(RequestFailedError, match="no memory"):
            await generation.feed(reader)
        assert reader.writes == [["x", "x"]]
        with pytest.raises(RequestFailedError, match="no memory"):
            await generation.wait_end()


async def test_who_waits_for_the_end_sleeps_until_then() -> None:
    front_end, leader = await serving()
    num_steps = MAX_IDS_WITHOUT_TEXT // 3 * 2
    async with front_end.generate([spec()]) as generation, asyncio.TaskGroup() as tasks:
        added = await leader.added()
        waiting = tasks.create_task(generation.wait_end())
        await settle()
        for _ in range(num_steps):
            step(leader, added, "é.")
            await settle()
        assert not generation._news.is_set()
        step(leader, added, "!", is_last=True)
    (whole,) = waiting.result()
    assert whole.text == "é." * num_steps + "!"
    assert len(whole.token_ids) == 3 * num_steps + 1
    assert len(whole.pieces) <= 6  # the text is made in large parts


async def test_tokens_are_tallied_by_the_time_between_them() -> None:
    front_end, leader = await serving()
    async with front_end.generate([spec(), spec()]) as generation:
        added = await leader.added(2)
        step(leader, added, "ab")
        step(leader, added, "cde", is_last=True)
        await generation.wait_end()
    assert sample(front_end, "generation_tokens_total", engine="0") == 10
    assert sample(front_end, "inter_token_latency_seconds_count", engine="0") == 6
    assert sample(front_end, "time_to_first_token_seconds_count", engine="0") == 2
    assert sample(front_end, "time_to_first_token_seconds_bucket", engine="0", le="60.0") == 2
    assert sample(front_end, "e2e_request_latency_seconds_bucket", engine="0", le="+Inf") == 2
