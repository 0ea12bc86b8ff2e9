"""What front ends ask trace threads, and what those answer. Beside `messages.py`, which is full."""

import msgspec

from aioengine.messages import Heartbeat


class AskState(msgspec.Struct, frozen=True, tag="ask_state"):
    """Front end to a rank: what are you in? Answered by a RankState."""


class AskStacks(msgspec.Struct, frozen=True, tag="ask_stacks"):
    """Front end to a rank: where is each of your threads? Answered by a RankStacks."""


TraceQuestion = AskState | AskStacks


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


TraceAnswer = RankState | RankStacks
