"""Spans of probed calls, and that nothing is left behind."""

from typing import Any

import pytest

from aioengine.messages import SlotStep, StepPlan
from aioengine.timeline.probe import Kind, Lane, Probe
from aioengine.timeline.recorder import Recorder, spans_of

PLAN = StepPlan((), (SlotStep(0, 1, 0, (5, 6, 7), (1,), True), SlotStep(1, 1, 4, (8,), (), True)))


class Made:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 3

    def attend(self, by: int) -> int:
        return self.value + by


class Part:
    def __init__(self) -> None:
        self.function = abs
        self.make = Made

    def execute(self, seq: int, plan: StepPlan) -> int:
        return self.inner(seq)

    def inner(self, number: int) -> int:
        if number < 0:
            raise ValueError("negative")
        return self.function(number)


def probes(part: Part) -> list[Probe]:
    return [
        Probe(part, "execute", Kind.STEP),
        Probe(part, "inner", Kind.LAYERS),
        Probe(part, "function", Kind.LINEAR),
        Probe(part, "make", Kind.BATCH, {"attend": Kind.ATTENTION}),
    ]


def kinds(recorder: Recorder) -> list[Kind]:
    return [kind for kind, *_ in spans_of(recorder.result())]


def test_calls_become_spans_that_lie_in_each_other() -> None:
    part, recorder = Part(), Recorder()
    recorder.install(Lane.DEVICE, probes(part))
    assert part.execute(7, PLAN) == 7
    linear, layers, step = spans_of(recorder.result())
    assert [linear[0], layers[0], step[0]] == [Kind.LINEAR, Kind.LAYERS, Kind.STEP]
    assert {linear[1], layers[1], step[1]} == {Lane.DEVICE}
    assert step[2] <= layers[2] <= linear[2] <= linear[3] <= layers[3] <= step[3]
    (note,) = recorder.steps
    assert (note.seq, note.num_requests, note.num_tokens, note.is_decode) == (7, 2, 4, False)
    assert note.began_ns <= step[2] <= step[3] <= note.ended_ns


def test_nothing_is_left_behind() -> None:
    part, recorder = Part(), Recorder()
    before = dict(vars(part))
    recorder.install(Lane.DEVICE, probes(part))
    assert vars(part) != before
    recorder.remove(Lane.DEVICE)
    assert vars(part) == before
    part.execute(7, PLAN)
    assert not recorder.steps
    recorder.remove(Lane.DEVICE)  # twice does no harm


def test_methods_of_what_is_made_are_spans_too() -> None:
    part, recorder = Part(), Recorder()
    recorder.install(Lane.DEVICE, probes(part))
    made = part.make()
    assert (made.attend(4), made.value) == (7, 3)
    assert kinds(recorder) == [Kind.BATCH, Kind.ATTENTION]
    recorder.remove(Lane.DEVICE)
    assert isinstance(part.make(), Made)


def test_a_call_that_raises_is_a_span_and_raises() -> None:
    part, recorder = Part(), Recorder()
    recorder.install(Lane.DEVICE, probes(part))
    with pytest.raises(ValueError, match="negative"):
        part.execute(-1, PLAN)
    assert kinds(recorder) == [Kind.LAYERS, Kind.STEP]
    assert [step.seq for step in recorder.steps] == [-1]


def test_what_has_no_room_is_dropped_and_said() -> None:
    told: list[int] = []
    part, recorder = Part(), Recorder(lambda note: told.append(note.seq), max_spans=4)
    recorder.install(Lane.DEVICE, probes(part))
    for seq in range(5):
        assert part.execute(seq, PLAN) == seq
    result = recorder.result()
    assert len(spans_of(result)) == 4
    assert [step.seq for step in result.steps] == [0]  # only whole steps
    assert result.is_cut
    assert told == [0, 1, 2, 3, 4]


def test_the_way_of_jobs_between_threads() -> None:
    class Thread:
        def __init__(self) -> None:
            self.jobs: list[tuple[Any, ...]] = []

        def submit(self, run: Any, on_done: Any, prepare: Any = None) -> None:
            self.jobs.append((run, on_done, prepare))

    thread, recorder, outcomes = Thread(), Recorder(), []
    recorder.watch_jobs(thread)
    for number in range(2):
        thread.submit(lambda number=number: number, lambda value, error: outcomes.append(value))
    values = [run() for run, _, _ in thread.jobs]
    for value, (_, on_done, _) in zip(values, thread.jobs, strict=True):
        on_done(value, None)
    assert outcomes == [0, 1]
    over, back = {}, {}
    for kind, lane, began_ns, ended_ns in spans_of(recorder.result()):
        assert began_ns <= ended_ns
        (over if kind is Kind.HAND_OVER else back).setdefault(lane, []).append((began_ns, ended_ns))
    assert set(over) == {Lane.HAND_OVER}
    assert set(back) == {Lane.HAND_BACK}
    for first, second in (over[Lane.HAND_OVER], back[Lane.HAND_BACK]):
        assert first[1] <= second[0]  # a job that waits for another one is not on its way
    recorder.remove(Lane.LOOP)
    assert "submit" not in vars(thread)
