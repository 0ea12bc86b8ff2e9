"""The scheduler under any order of arrivals, aborts, plans, late results and failures."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.unit.core.replica_model import Replica, Sizes

SHARED_PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8)


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    block_size = draw(st.integers(1, 4))
    num_usable = draw(st.integers(3, 10))
    num_slots = draw(st.integers(2, 6))
    return Sizes(
        num_blocks=num_usable + 1,
        block_size=block_size,
        num_slots=num_slots,
        num_stages=draw(st.integers(1, 3)),
        max_num_batched_tokens=num_slots + draw(st.integers(0, 12)),
        max_model_len=num_usable * block_size - draw(st.integers(0, 1)),
        async_scheduling=draw(st.booleans()),
        enable_prefix_caching=draw(st.sampled_from([True, True, True, False])),
    )


Arrival = dict[str, Any]


def arrivals() -> st.SearchStrategy[Arrival]:
    """Keyword arguments of `Replica.add`. Many prompts begin alike."""
    prompts = st.tuples(
        st.sampled_from([SHARED_PROMPT[:length] for length in (0, 4, 7, 12, 19)]),
        st.lists(st.integers(0, 10), min_size=1, max_size=3),
    )
    return st.fixed_dictionaries(
        {
            "token_ids": prompts.map(lambda prompt: (*prompt[0], *prompt[1])),
            "max_tokens": st.integers(1, 12),
            "min_tokens": st.integers(0, 3),
            "stop_token_ids": st.sampled_from([(), (), (0,), (2, 7)]),
            "priority": st.integers(0, 2),
            "cache_salt": st.sampled_from(["", "", "salt"]),
            "source": st.sampled_from("ab"),
            "prompt_logprobs": st.sampled_from([None, None, 0]),
            "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3]),
            "frequency_penalty": st.sampled_from([0.0, 0.0, 0.5]),
        }
    )


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(sizes=sizes())
    def start(self, sizes: Sizes) -> None:
        self.replica = Replica(sizes)

    @rule(arrivals=st.lists(arrivals(), min_size=1, max_size=5))
    def add(self, arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            token_ids = arrival.pop("token_ids")[: self.replica.sizes.max_model_len]
            self.replica.add(token_ids, **arrival)

    @precondition(lambda self: self.replica.has_room)
    @rule()
    def schedule(self) -> None:
        self.replica.schedule()

    @precondition(lambda self: self.replica.in_flight)
    @rule()
    def apply(self) -> None:
        self.replica.apply()

    @rule(num_turns=st.integers(1, 12))
    def run_full(self, num_turns: int) -> None:
        """The pipeline as the engine keeps it: a plan whenever there is room."""
        for _ in range(num_turns):
            if not self.replica.has_room or self.replica.schedule().is_empty:
                if not self.replica.in_flight:
                    return
                self.replica.apply()

    @precondition(lambda self: self.replica.clients)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Any request, ended ones too: their front end may not know yet."""
        self.replica.abort(data.draw(st.sampled_from(list(self.replica.clients))))

    @rule(source=st.sampled_from("ab"))
    def lose_front_end(self, source: str) -> None:
        self.replica.abort_source(source)

    @precondition(lambda self: self.replica.in_flight)
    @rule(row=st.integers(0, 2))
    def apply_with_unusable_logits(self, row: int) -> None:
        self.replica.apply(error_row=row)

    @precondition(lambda self: self.replica.has_room and not self.replica.device.is_broken)
    @rule()
    def schedule_a_plan_that_fails(self) -> None:
        self.replica.schedule(fails=True)

    @invariant()
    def holds(self) -> None:
        self.replica.scheduler.check_invariants()

    def teardown(self) -> None:
        self.replica.drain()


SchedulerMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, report_multiple_bugs=False
)
TestSchedulerMachine = SchedulerMachine.TestCase
