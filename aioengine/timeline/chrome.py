"""Recordings of several ranks as one trace in Chrome's JSON format, which Perfetto reads. Pure.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from aioengine.timeline.clock import ClockOffset
from aioengine.timeline.probe import COLLECTIVES, Kind, Lane
from aioengine.timeline.recorder import spans_of
from aioengine.trace_messages import RecordedSteps, StepNote


class Track(IntEnum):
    """A thread of the trace."""

    LOOP = 1
    HAND_OVER = 2
    DEVICE = 3
    COLLECTIVES = 4
    """Of the device thread, but easier to compare between ranks on a track of its own."""
    HAND_BACK = 5


TITLES = {
    Track.LOOP: "event loop",
    Track.HAND_OVER: "hand-over to the device thread",
    Track.DEVICE: "device thread",
    Track.COLLECTIVES: "collectives, transfers",
    Track.HAND_BACK: "hand-back to the loop",
}
TRACK_OF = {
    Lane.LOOP: Track.LOOP,
    Lane.DEVICE: Track.DEVICE,
    Lane.HAND_OVER: Track.HAND_OVER,
    Lane.HAND_BACK: Track.HAND_BACK,
}


@dataclass(frozen=True, slots=True)
class RankRecording:
    rank: int
    coords: str
    title: str
    recorded: RecordedSteps
    steps: Sequence[StepNote]
    """Those of the recording to be shown; what the device thread did before and after is left
    out."""
    clock: ClockOffset


def to_chrome(ranks: Sequence[RankRecording], metadata: dict[str, Any]) -> dict[str, Any]:
    """Times begin at 0 with the first span of any rank, in microseconds."""
    aligned = [(rank, list(_aligned(rank))) for rank in ranks]
    zero_ns = min((span[2] for _, spans in aligned for span in spans), default=0)
    events: list[dict[str, Any]] = []
    for rank, spans in aligned:
        events += _names(rank)
        events += (
            _event(rank.rank, name, track, began_ns - zero_ns, ended_ns - began_ns, args)
            for name, track, began_ns, ended_ns, args in spans
        )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": metadata}


_Shown = tuple[str, Track, int, int, dict[str, Any]]


def _aligned(rank: RankRecording) -> Iterator[_Shown]:
    """Steps with what was in them, and what else was recorded; on the common clock."""
    offset_ns = rank.clock.offset_ns
    for step in rank.steps:
        args = {"seq": step.seq, "requests": step.num_requests, "tokens": step.num_tokens}
        begin_ns, end_ns = step.began_ns + offset_ns, step.ended_ns + offset_ns
        yield f"step {step.seq}", Track.DEVICE, begin_ns, end_ns, args
    for kind, lane, began_ns, ended_ns in _of_steps(rank):
        if kind is not Kind.STEP:
            track = Track.COLLECTIVES if kind in COLLECTIVES else TRACK_OF[lane]
            yield kind.value, track, began_ns + offset_ns, ended_ns + offset_ns, {}


def _of_steps(rank: RankRecording) -> Iterable[tuple[Kind, Lane, int, int]]:
    if not rank.steps:
        return
    first_ns, last_ns = rank.steps[0].began_ns, rank.steps[-1].ended_ns
    for span in spans_of(rank.recorded):
        _, lane, began_ns, ended_ns = span
        if lane is not Lane.DEVICE or (began_ns >= first_ns and ended_ns <= last_ns):
            yield span


def _names(rank: RankRecording) -> Iterator[dict[str, Any]]:
    def meta(what: str, tid: int, args: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": rank.rank, "tid": tid, "ts": 0, "args": args}

    yield meta("process_name", 0, {"name": rank.title})
    yield meta("process_sort_index", 0, {"sort_index": rank.rank})
    for track, title in TITLES.items():
        yield meta("thread_name", int(track), {"name": title})
        yield meta("thread_sort_index", int(track), {"sort_index": int(track)})


def _event(
    pid: int, name: str, track: Track, begin_ns: int, lasts_ns: int, args: dict[str, Any]
) -> dict[str, Any]:
    event: dict[str, Any] = {
        "ph": "X",
        "name": name,
        "cat": track.name.lower(),
        "pid": pid,
        "tid": int(track),
        "ts": begin_ns / 1e3,
        "dur": lasts_ns / 1e3,
    }
    return event | {"args": args} if args else event
