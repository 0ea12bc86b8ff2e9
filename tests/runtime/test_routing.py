"""Which replica of fake leaders the front end gives a choice to."""

import dataclasses

import msgspec
import pytest
from support.fake_leaders import front_end_with_leaders, serving, spec
from support.mailbox import settle

from aioengine.frontend.front_end import UnavailableError
from aioengine.messages import AddRequest


async def test_the_least_loaded_replica_gets_the_next_and_ties_rotate() -> None:
    front_end, leaders = await serving(3)
    for _ in range(6):
        front_end.generate([spec()])
    assert [len(replica.live) for replica in front_end.replicas] == [2, 2, 2]
    front_end.generate([spec(), spec()], dp_rank=0)
    front_end.generate([spec()], dp_rank=1)
    front_end.generate([spec()])
    assert [len(replica.live) for replica in front_end.replicas] == [4, 3, 3]
    await settle()
    assert [len(leader.of(AddRequest)) for leader in leaders] == [4, 3, 3]


async def test_a_single_request_at_a_time_visits_every_replica() -> None:
    front_end, leaders = await serving(3)
    for _ in range(6):
        async with front_end.generate([spec()]):
            pass
    await settle()
    assert [len(leader.of(AddRequest)) for leader in leaders] == [2, 2, 2]


async def test_a_failed_replica_is_avoided_and_pins_to_it_are_refused() -> None:
    front_end, leaders = await serving(3)
    leaders[1].fail("lost rank 3")
    await settle()
    front_end.generate([spec() for _ in range(8)])
    assert [len(replica.live) for replica in front_end.replicas] == [4, 0, 4]
    with pytest.raises(UnavailableError, match="lost rank 3"):
        front_end.generate([spec()], dp_rank=1)
    for dp_rank in (-1, 3):
        with pytest.raises(ValueError, match="not one of the 3 replicas"):
            front_end.generate([spec()], dp_rank=dp_rank)


async def test_a_refused_pin_leaves_nothing_open() -> None:
    front_end, leaders = await serving(2)
    leaders[1].fail("lost rank 3")
    await settle()
    with pytest.raises(UnavailableError, match="lost rank 3"):
        front_end.generate([spec()], dp_rank=1)
    assert front_end.idle.is_set()  # a drain would wait for what is open


async def test_an_equal_beginning_goes_where_it_went_before() -> None:
    front_end, leaders = await serving(3)
    places = []
    for end in "abcd":
        async with front_end.generate([spec("x" * 70 + end)]):
            places.append([len(replica.live) for replica in front_end.replicas])
    assert places == [[1, 0, 0]] * 4
    async with front_end.generate([spec("x" * 70, cache_salt="other")]):
        assert [len(replica.live) for replica in front_end.replicas] == [0, 1, 0]
    leaders[0].report(prefix_cache_epoch=1)
    await settle()
    async with front_end.generate([spec("x" * 70)]):
        assert [len(replica.live) for replica in front_end.replicas] == [0, 0, 1]


async def test_who_wants_to_know_the_prompt_goes_anywhere() -> None:
    """A prompt's log probabilities are computed, cached or not."""
    front_end, _ = await serving(3)
    plain = spec("x" * 200)
    params = msgspec.structs.replace(plain.params, prompt_logprobs=1)
    described = dataclasses.replace(plain, params=params)
    for dp_rank in range(3):
        async with front_end.generate([described]):
            assert len(front_end.replicas[dp_rank].live) == 1


async def test_prompts_of_one_request_spread() -> None:
    front_end, _ = await serving(2)
    one, other = spec("x" * 200), spec("y" * 200)
    front_end.generate([one, one, other, other])
    assert [len(replica.live) for replica in front_end.replicas] == [2, 2]


async def test_what_others_sent_counts() -> None:
    front_end, leaders = await serving(2)
    leaders[0].report(num_running=5)
    await settle()
    front_end.generate([spec(), spec()])
    assert [len(replica.live) for replica in front_end.replicas] == [0, 2]
    leaders[1].report(num_running=2, num_added=2)
    leaders[0].report(num_running=8, num_waiting=1)
    await settle()
    front_end.generate([spec()])
    assert [len(replica.live) for replica in front_end.replicas] == [0, 3]


async def test_nobody_waits_for_a_slot_while_another_replica_has_one() -> None:
    front_end, leaders = front_end_with_leaders(2)
    leaders[0].ready(num_slots=2)
    leaders[1].ready(num_slots=6)
    await settle()
    front_end.generate([spec() for _ in range(8)])
    assert [len(replica.live) for replica in front_end.replicas] == [2, 6]
