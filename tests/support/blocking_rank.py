"""`python -m aioengine.launch`, with methods for `collective_rpc` that block one of the ranks.

Run as a script in the place of the module.
"""

import asyncio
import os
import threading
import time
from typing import Any, Final

import uvloop

from aioengine import launch
from aioengine.engine.device import DeviceThread
from aioengine.rpc import rpc_method

LIMIT_S: Final = 60.0
REPLY_S: Final = 0.2
"""For the reply to the call that blocks."""
LOOPS: Final[list[asyncio.AbstractEventLoop]] = []
IS_STUCK: Final = threading.Event()
new_event_loop = uvloop.new_event_loop
take_arrived = DeviceThread._take_arrived


def keep_loop() -> asyncio.AbstractEventLoop:
    LOOPS.append(new_event_loop())
    return LOOPS[-1]


def take_arrived_or_hang(device: DeviceThread, waiting: Any) -> None:
    if IS_STUCK.is_set():
        time.sleep(LIMIT_S)
    take_arrived(device, waiting)


def wait_for_file(path: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.01)


@rpc_method
def block_loop(worker: Any, rank: int, path: str) -> None:
    """Soon the event loop of a rank runs nothing more until there is such a file."""
    if worker.rank == rank:
        LOOPS[0].call_soon_threadsafe(LOOPS[0].call_later, REPLY_S, wait_for_file, path)


@rpc_method
def hang_when_idle(worker: Any, rank: int) -> None:
    """The device thread of a rank hangs after this call."""
    if worker.rank == rank:
        IS_STUCK.set()


if __name__ == "__main__":
    uvloop.new_event_loop = keep_loop  # type: ignore[assignment]
    DeviceThread._take_arrived = take_arrived_or_hang  # type: ignore[method-assign]
    launch.main()
