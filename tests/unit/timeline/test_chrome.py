"""Recordings become a trace on one clock."""

from typing import Any

import pytest
from support.chrome_traces import check_trace, spans_named
from support.recordings import MS, recorded, step

from aioengine.timeline.chrome import RankRecording, Track, to_chrome
from aioengine.timeline.clock import SAME_CLOCK, ClockOffset
from aioengine.timeline.probe import Kind

STEPS = [step(7, 10, 18, 3, 5), step(8, 20, 28, 3, 3), step(9, 30, 38)]
SPANS = [
    (Kind.LAYERS, 11, 17),
    (Kind.LINEAR, 12, 16),
    (Kind.ALL_REDUCE, 15, 16),
    (Kind.LAYERS, 31, 37),
    (Kind.PLAN, 8, 9),
    (Kind.HAND_OVER, 9, 10),
    (Kind.HAND_BACK, 18, 18.5),
]


def trace(*clocks: ClockOffset) -> dict[str, Any]:
    ranks = [
        RankRecording(rank, "dp0", f"rank {rank}", recorded(STEPS, SPANS), STEPS[:2], clock)
        for rank, clock in enumerate(clocks)
    ]
    return to_chrome(ranks, {"a": "note"})


def test_it_has_the_form_of_a_trace() -> None:
    made = trace(SAME_CLOCK, SAME_CLOCK)
    check_trace(made)
    assert made["otherData"] == {"a": "note"}
    events = [event for event in made["traceEvents"] if event["pid"] == 1]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"event loop", "device thread", "collectives, transfers"} <= names
    (title,) = (event["args"] for event in events if event["name"] == "process_name")
    assert title == {"name": "rank 1"}
    (first,) = (event for event in events if event["name"] == "step 7")
    assert first["args"] == {"seq": 7, "requests": 3, "tokens": 5}
    assert (first["ts"], first["dur"]) == (2000.0, 8000.0)  # behind the plan
    tracks = {event["name"]: event["tid"] for event in events if event["ph"] == "X"}
    assert tracks == {
        "step 7": Track.DEVICE,
        "step 8": Track.DEVICE,
        "layers": Track.DEVICE,
        "linear": Track.DEVICE,
        "all-reduce": Track.COLLECTIVES,
        "plan": Track.LOOP,
        "hand-over": Track.HAND_OVER,
        "hand-back": Track.HAND_BACK,
    }


def test_what_is_beside_the_wanted_steps_is_left_out() -> None:
    made = trace(SAME_CLOCK)
    assert len(spans_named(made, "step ", 0)) == 2
    assert len(spans_named(made, "layers", 0)) == 1


def test_other_clocks_are_moved() -> None:
    made = trace(SAME_CLOCK, ClockOffset(5 * MS, 10))
    check_trace(made)
    (here,), (there,) = (spans_named(made, "layers", rank) for rank in range(2))
    assert there[0] - here[0] == pytest.approx(5000)


def test_no_steps_make_an_empty_trace() -> None:
    empty = RankRecording(0, "dp0", "rank 0", recorded([], SPANS), [], SAME_CLOCK)
    made = to_chrome([empty], {})
    check_trace(made)
    assert all(event["ph"] == "M" for event in made["traceEvents"])
