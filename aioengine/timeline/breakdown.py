"""Where the time of a rank's steps went. Pure.

Steps of a rank follow each other on its device thread, so the time from the begin of one step to
the begin of the next is what the thread did, its waiting included: rows of the device thread add up
to the period of a step. What the event loop did meanwhile stands beside it.

Recording a call takes about a microsecond, most of which counts for the call around it: for the
layers that is "elementwise, norms".
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol, TypeVar

import msgspec

from aioengine.timeline.probe import Kind, Lane
from aioengine.timeline.recorder import spans_of
from aioengine.trace_messages import RecordedSteps, StepNote

WAITING: Final = "waiting"
OTHER: Final = "other"
ROW_OF: Final[Mapping[Kind, str]] = {
    Kind.POST_RECEIVE: "build batch",
    Kind.BATCH: "build batch",
    Kind.EMBED: "embed",
    Kind.ATTENTION: "attention",
    Kind.LINEAR: "linear",
    Kind.LAYERS: "elementwise, norms",
    Kind.NORM: "elementwise, norms",
    Kind.ROTARY: "elementwise, norms",
    Kind.ALL_REDUCE: "all-reduce",
    Kind.ALL_GATHER: "all-gather",
    Kind.REDUCE_SCATTER: "reduce-scatter",
    Kind.BROADCAST: "broadcast",
    Kind.SEND: "send to stage",
    Kind.RECEIVE: "receive from stage",
    Kind.SEND_IDS: "send, receive ids",
    Kind.RECEIVE_IDS: "send, receive ids",
    Kind.LOGITS: "logits",
    Kind.SAMPLE: "sample",
    Kind.STEP: OTHER,
    Kind.OTHER_JOB: OTHER,
}
"""Of the device thread."""
DEVICE_ROWS: Final = ("hand-over", *dict.fromkeys(ROW_OF.values()), WAITING)
LOOP_ROWS: Final = (
    *(Kind.PLAN, Kind.SEND_PLAN, Kind.TAKE_PLAN, Kind.HAND_BACK),
    *(Kind.SEND_RESULT, Kind.APPLY, Kind.REPORT),
)

_Span = tuple[Kind, Lane, int, int]


class Breakdown(msgspec.Struct, frozen=True):
    """Milliseconds of a step, on average."""

    num_steps: int
    period_ms: float
    device: dict[str, float]
    """By row of DEVICE_ROWS; together the period."""
    loop: dict[str, float]
    """By row of LOOP_ROWS."""

    @property
    def is_empty(self) -> bool:
        return not self.num_steps


def breakdown(recorded: RecordedSteps, steps: Sequence[StepNote]) -> Breakdown:
    """Of adjacent steps of the recording. The last one only ends the period of the one before."""
    if len(steps) < 2:
        return Breakdown(0, 0.0, {}, {})
    begin_ns, end_ns = steps[0].began_ns, steps[-1].began_ns
    lanes: dict[Lane, list[_Span]] = defaultdict(list)
    for span in spans_of(recorded):
        if begin_ns <= span[2] < end_ns:
            lanes[span[1]].append(span)
    device: Counter[str] = Counter()
    for kind, own_ns in own_times(lanes[Lane.DEVICE]):
        device[ROW_OF[kind]] += own_ns
    # Receives are posted on the way of a job to the thread.
    posted = [span for span in lanes[Lane.DEVICE] if span[0] is Kind.POST_RECEIVE]
    device["hand-over"] = _length(lanes[Lane.HAND_OVER], end_ns) - _inside(
        posted, lanes[Lane.HAND_OVER]
    )
    device[WAITING] = end_ns - begin_ns - sum(device.values())
    loop: Counter[str] = Counter()
    for kind, own_ns in own_times(lanes[Lane.LOOP]):
        loop[kind] += own_ns
    loop[Kind.HAND_BACK] = _length(lanes[Lane.HAND_BACK], end_ns)
    num_steps = len(steps) - 1
    unit = num_steps * 1e6
    return Breakdown(
        num_steps,
        (end_ns - begin_ns) / unit,
        {row: device[row] / unit for row in DEVICE_ROWS if device[row]},
        {str(row): loop[row] / unit for row in LOOP_ROWS if loop[row]},
    )


def mean(parts: Iterable[Breakdown]) -> Breakdown:
    """Of several recordings, by their steps."""
    found = [part for part in parts if not part.is_empty]
    num_steps = sum(part.num_steps for part in found)
    if not num_steps:
        return Breakdown(0, 0.0, {}, {})

    def average(rows: Iterable[str], values: Sequence[Mapping[str, float]]) -> dict[str, float]:
        totals = {
            row: sum(
                part.num_steps * of.get(row, 0.0) for part, of in zip(found, values, strict=True)
            )
            for row in rows
        }
        return {row: total / num_steps for row, total in totals.items() if total}

    return Breakdown(
        num_steps,
        sum(part.num_steps * part.period_ms for part in found) / num_steps,
        average(DEVICE_ROWS, [part.device for part in found]),
        average(map(str, LOOP_ROWS), [part.loop for part in found]),
    )


def own_times(spans: Iterable[_Span]) -> Iterable[tuple[Kind, int]]:
    """What each span of one lane spent outside of those within it, in nanoseconds."""
    open_spans: list[tuple[Kind, int, int]] = []  # kind, end, own time so far

    def close(until_ns: int | None) -> Iterable[tuple[Kind, int]]:
        while open_spans and (until_ns is None or open_spans[-1][1] <= until_ns):
            kind, _, own_ns = open_spans.pop()
            yield kind, own_ns

    for kind, _, began_ns, ended_ns in sorted(spans, key=lambda span: (span[2], -span[3])):
        yield from close(began_ns)
        if open_spans:
            outer, outer_end_ns, own_ns = open_spans[-1]
            open_spans[-1] = (outer, outer_end_ns, own_ns - (ended_ns - began_ns))
        open_spans.append((kind, ended_ns, ended_ns - began_ns))
    yield from close(None)


class Decoding(Protocol):
    """What is known of a step, however it was recorded."""

    @property
    def num_requests(self) -> int: ...

    @property
    def is_decode(self) -> bool: ...


SomeStep = TypeVar("SomeStep", bound=Decoding)


def steady_decodes(
    steps: Sequence[SomeStep], num_streams: int, num_microbatches: int
) -> Sequence[SomeStep]:
    """The longest run of steps of which every `num_microbatches` give each stream a token."""
    best: Sequence[SomeStep] = ()
    first = 0
    for last, step in enumerate(steps):
        if not step.is_decode:
            first = last + 1
        elif last - first + 1 >= num_microbatches:
            recent = steps[last - num_microbatches + 1 : last + 1]
            if sum(each.num_requests for each in recent) != num_streams:
                first = last - num_microbatches + 2
        if last + 1 - first > max(len(best), num_microbatches - 1):
            best = steps[first : last + 1]
    return best


def _length(spans: Iterable[_Span], end_ns: int) -> int:
    return sum(min(ended_ns, end_ns) - began_ns for _, _, began_ns, ended_ns in spans)


def _inside(spans: Sequence[_Span], others: Sequence[_Span]) -> int:
    """How much of `spans` lies within `others`; both in order, each without overlaps."""
    total, position = 0, 0
    for _, _, began_ns, ended_ns in others:
        while position < len(spans) and spans[position][3] <= began_ns:
            position += 1
        for _, _, inner_began_ns, inner_ended_ns in spans[position:]:
            if inner_began_ns >= ended_ns:
                break
            total += min(ended_ns, inner_ended_ns) - max(began_ns, inner_began_ns)
    return total
