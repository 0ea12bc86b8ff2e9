"""What of a step can be timed: the parts of the engine list their own calls, a recorder times
them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any


class Lane(IntEnum):
    """Where a span lies: what one thread does one after the other, nested."""

    LOOP = 0
    DEVICE = 1
    HAND_OVER = 2
    """From the loop's `submit` until the device thread, which is free, begins the job."""
    HAND_BACK = 3
    """From the job's end until the loop has its outcome."""


class Kind(StrEnum):
    """What a span is spent on."""

    # the leader's loop
    PLAN = "plan"
    SEND_PLAN = "encode, send plan"
    APPLY = "apply result"
    REPORT = "report to front ends"
    # a peer's loop
    TAKE_PLAN = "take plan"
    SEND_RESULT = "send result"
    # the device thread
    STEP = "step"
    OTHER_JOB = "other job"
    POST_RECEIVE = "post receive"
    BATCH = "build batch"
    LAYERS = "layers"
    EMBED = "embed"
    NORM = "norm"
    ROTARY = "rotary"
    LINEAR = "linear"
    ATTENTION = "attention"
    LOGITS = "logits"
    SAMPLE = "sample"
    # moving data, or waiting for it, on the device thread
    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    BROADCAST = "broadcast"
    SEND = "send to stage"
    RECEIVE = "receive from stage"
    SEND_IDS = "send ids"
    RECEIVE_IDS = "receive ids"
    # between the two threads
    HAND_OVER = "hand-over"
    HAND_BACK = "hand-back"


COLLECTIVES = frozenset(
    {
        *(Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.BROADCAST),
        *(Kind.SEND, Kind.RECEIVE, Kind.SEND_IDS, Kind.RECEIVE_IDS),
    }
)
"""What waits for other ranks."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Calls of `owner.name` are spans of `kind`.

    A recorder puts a function of its own into the owner's `__dict__`, and takes it away again: who
    is not recorded pays nothing. So the owner must have a `__dict__`, and callers must look the
    name up on the instance, for every call. A probe of Kind.STEP is called with (seq, plan).
    """

    owner: Any
    name: str
    kind: Kind
    makes: Mapping[str, Kind] = field(default_factory=dict)
    """Methods of what the call returns that are spans, too, and of which kind."""


Span = tuple[int, int, int]
"""Index of the kind in `KINDS`, begin, end; CLOCK_MONOTONIC in nanoseconds."""
KINDS = tuple(Kind)


@dataclass(frozen=True, slots=True)
class SpanSource:
    """`owner.name` is None, or, while there is a recorder, what takes the spans of calls that the
    owner times itself, as Python does not make them: a `Callable[[Iterable[Span]], None]`."""

    owner: Any
    name: str


AnyProbe = Probe | SpanSource
