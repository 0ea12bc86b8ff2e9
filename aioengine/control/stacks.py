"""What every thread of this process is in, as text. Any thread may ask."""

import sys
import threading
import traceback
from collections.abc import Iterable
from typing import Final

from aioengine.trace_messages import ThreadStack

MAX_FRAMES: Final = 100
"""Of one thread, innermost: a recursion may be deep."""
MAX_THREADS: Final = 200
MAX_STACK_CHARS: Final = 2**15
"""Of one thread: source lines may be long."""


def stacks_of_threads() -> tuple[ThreadStack, ...]:
    """The main thread first, then by name; not the thread that asks. Threads that Python has not
    started have no name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    stacks = [
        ThreadStack(
            names.get(ident, f"thread {ident}"),
            "".join(traceback.format_stack(frame, MAX_FRAMES))[-MAX_STACK_CHARS:],
        )
        for ident, frame in frames.items()
    ]
    stacks.sort(key=lambda stack: (stack.thread != "MainThread", stack.thread))
    return tuple(stacks[:MAX_THREADS])


def format_stacks(stacks: Iterable[ThreadStack]) -> str:
    """For logs."""
    return "\n".join(f"thread {stack.thread}:\n{stack.stack.rstrip()}" for stack in stacks)
