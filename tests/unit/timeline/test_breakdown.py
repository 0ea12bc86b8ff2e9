"""Rows add up to the period of a step, and only steady steps count."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.recordings import recorded, step

from aioengine.timeline.breakdown import Breakdown, breakdown, mean, own_times, steady_decodes
from aioengine.timeline.probe import Kind, Lane
from aioengine.trace_messages import StepNote

STEPS = [step(1, 0, 8), step(2, 10, 18), step(3, 20, 28)]
SPANS = [
    (Kind.BATCH, 0, 1),
    (Kind.LAYERS, 1, 6),
    (Kind.LINEAR, 1, 4),
    (Kind.ALL_REDUCE, 3, 4),
    (Kind.ATTENTION, 4, 5),
    (Kind.LOGITS, 6, 7),
    (Kind.PLAN, 8, 9),
    (Kind.POST_RECEIVE, 9.25, 9.5),
    (Kind.HAND_OVER, 9, 10),
    (Kind.HAND_BACK, 8, 8.5),
    (Kind.LAYERS, 11, 17),
    (Kind.LINEAR, 21, 24),  # of the last step, which only ends the one before
]


def test_a_row_has_what_its_spans_do_not_leave_to_others() -> None:
    found = breakdown(recorded(STEPS, SPANS), STEPS)
    assert found.num_steps == 2
    assert found.period_ms == 10
    assert found.device == {
        "hand-over": 0.375,
        "build batch": 0.625,
        "attention": 0.5,
        "linear": 1.0,
        "elementwise, norms": 3.5,
        "all-reduce": 0.5,
        "logits": 0.5,
        "other": 1.5,
        "waiting": 1.5,
    }
    assert sum(found.device.values()) == found.period_ms
    assert found.loop == {"plan": 0.5, "hand-back": 0.25}


@pytest.mark.parametrize("steps", [[], STEPS[:1]])
def test_one_step_has_no_period(steps: list[StepNote]) -> None:
    assert breakdown(recorded(STEPS, SPANS), steps).is_empty


def test_several_recordings_count_by_their_steps() -> None:
    one = Breakdown(1, 2.0, {"linear": 2.0}, {"plan": 1.0})
    three = Breakdown(3, 6.0, {"linear": 5.0, "sample": 1.0}, {})
    none = Breakdown(0, 0.0, {}, {})
    assert mean([one, none, three]) == Breakdown(
        4, 5.0, {"linear": 4.25, "sample": 0.75}, {"plan": 0.25}
    )
    assert mean([none]).is_empty


@given(st.lists(st.integers(1, 5), min_size=1, max_size=30), st.randoms())
def test_own_times_add_up_to_the_outermost_spans(lengths: list[int], random) -> None:  # noqa: ANN001
    """Of any tree of spans."""
    spans = []

    def grow(begin: int, depth: int) -> int:
        end = begin + lengths[depth % len(lengths)]
        if depth < len(lengths):
            for _ in range(random.randint(0, 2)):
                end = grow(end, depth + 1 + random.randint(0, len(lengths)))
            end += 1
        spans.append((Kind.LAYERS, Lane.DEVICE, begin, end))
        return end

    end = grow(0, 0)
    assert sum(own_ns for _, own_ns in own_times(spans)) == end
    assert all(own_ns >= 0 for _, own_ns in own_times(spans))


def sizes(steps: Sequence[StepNote]) -> list[int]:
    return [step.seq for step in steps]


def decodes(*requests: int) -> list[StepNote]:
    """Steps 0, 1, …; a negative number is a prefill."""
    return [step(seq, seq, seq, abs(n), n if n > 0 else 99) for seq, n in enumerate(requests)]


@pytest.mark.parametrize(
    ("steps", "num_streams", "num_microbatches", "steady"),
    [
        (decodes(-4, -4, 4, 4, 4, 3, 3), 4, 1, [2, 3, 4]),
        (decodes(4, 4, -1, 4, 4, 4, 2), 4, 1, [3, 4, 5]),
        (decodes(-2, 2, 2, 2, 2, 1, 1), 4, 2, [1, 2, 3, 4]),
        (decodes(-3, 2, 3, 2, 3, 3, 1), 5, 2, [1, 2, 3, 4]),
        (decodes(1, 1, 1), 4, 1, []),
        (decodes(1, 1, 1), 1, 1, [0, 1, 2]),
        ([], 4, 1, []),
    ],
)
def test_steps_in_which_all_streams_decode(
    steps: list[StepNote], num_streams: int, num_microbatches: int, steady: list[int]
) -> None:
    assert sizes(steady_decodes(steps, num_streams, num_microbatches)) == steady
