"""What front ends ask trace threads, and what those answer."""

from typing import Final

import msgspec

from aioengine.messages import Heartbeat

DEFAULT_RECORDED_STEPS: Final = 20
DEFAULT_RECORDED_SECONDS: Final = 10


class AskState(msgspec.Struct, frozen=True, tag="ask_state"):
    """Front end to a rank: what are you in? Answered by a RankState."""


class AskStacks(msgspec.Struct, frozen=True, tag="ask_stacks"):
    """Front end to a rank: where is each of your threads? Answered by a RankStacks."""


class AskClock(msgspec.Struct, frozen=True, tag="ask_clock"):
    """Front end to a rank: what time is it? Answered by a ClockReading, at once."""


class BeginRecording(msgspec.Struct, frozen=True, tag="begin_recording"):
    """Front end to a rank: record your steps from now on, until this connection ends. Answered by
    RecordingBegan or RecordingRefused."""


class AskSteps(msgspec.Struct, frozen=True, tag="ask_steps"):
    """Behind BeginRecording: let me have `num_steps` steps, those from job `first_seq` on. Answered
    by a RecordedSteps, with fewer when `limit_s` seconds are over or the replica fails."""

    first_seq: int
    num_steps: int
    limit_s: float


TraceQuestion = AskState | AskStacks | AskClock | BeginRecording | AskSteps


class ThreadStack(msgspec.Struct, frozen=True, array_like=True):
    thread: str
    stack: str
    """As a traceback shows it, outermost call first."""


class LoopBlock(msgspec.Struct, frozen=True, array_like=True):
    """A time in which the event loop did not run."""

    ended_s_ago: float
    lasted_s: float
    """So far, if it is not over."""
    is_over: bool
    stacks: tuple[ThreadStack, ...]
    """At its beginning."""


class HeardBeat(msgspec.Struct, frozen=True, array_like=True):
    """The last heartbeat that a rank has got from another one."""

    rank: int
    beat: Heartbeat
    age_s: float


class RankState(msgspec.Struct, frozen=True, kw_only=True, tag="rank_state"):
    pulse: Heartbeat
    last_operation: str
    """The last collective or transfer, whether it has ended or not."""
    num_queued: int
    """Jobs on the device thread, the running one included."""
    num_running: int | None
    """Requests, on leaders."""
    num_waiting: int | None
    loop_lag_s: float
    max_loop_lag_s: float
    """Within the last minute."""
    rss_bytes: int
    num_fds: int
    num_threads: int
    uptime_s: float
    heard: tuple[HeardBeat, ...]


class RankStacks(msgspec.Struct, frozen=True, tag="rank_stacks"):
    threads: tuple[ThreadStack, ...]
    block: LoopBlock | None
    """The last time that the event loop was blocked, perhaps now."""


class ClockReading(msgspec.Struct, frozen=True, tag="clock"):
    monotonic_ns: int
    clock: str
    """Which clock that is: ranks that say the same share one."""


class RecordingBegan(msgspec.Struct, frozen=True, tag="recording_began"):
    last_seq: int
    """The last job that is not recorded."""


class RecordingRefused(msgspec.Struct, frozen=True, tag="recording_refused"):
    reason: str


class StepNote(msgspec.Struct, frozen=True, array_like=True):
    """One step of one rank. Times are of CLOCK_MONOTONIC, in nanoseconds."""

    seq: int
    began_ns: int
    ended_ns: int
    num_requests: int
    num_tokens: int

    @property
    def is_decode(self) -> bool:
        """One token for each request."""
        return self.num_tokens == self.num_requests


class RecordedSteps(msgspec.Struct, frozen=True, kw_only=True, tag="recorded_steps"):
    """What a rank did, made and read by `timeline/recorder.py`."""

    steps: tuple[StepNote, ...]
    kinds: tuple[str, ...]
    spans: bytes
    """int64 rows (index of the kind, lane, begin, end) in this machine's byte order."""
    is_cut: bool
    """There was no room for all."""
    error: str = ""
    """Why there is no more: the replica has failed, or the rank cannot record."""


TraceAnswer = (
    RankState | RankStacks | ClockReading | RecordingBegan | RecordingRefused | RecordedSteps
)
