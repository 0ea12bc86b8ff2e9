"""A process that sets up a rank's log, then says all that a rank may say. Argument: --log-dir."""

import faulthandler
import gc
import logging
import os
import sys
import threading
import warnings

from aioengine.config import EngineConfig
from aioengine.control.deadline import Deadline
from aioengine.dist.launcher_env import LauncherEnv
from aioengine.layout import ParallelLayout
from aioengine.rank.logs import set_up_logging
from aioengine.rank.place import Place


def fail(text: str) -> None:
    raise RuntimeError(text)


class Unraisable:
    def __del__(self) -> None:
        fail("in __del__")


if __name__ == "__main__":
    faulthandler.enable()
    place = Place(
        EngineConfig(log_dir=sys.argv[1] if len(sys.argv) > 1 else None),
        LauncherEnv(kind="torchrun", rank=1, world_size=2),
        ParallelLayout(tp_size=2),
        "127.0.0.1",
        Deadline(1.0),
    )
    set_up_logging(place)
    logging.getLogger("aioengine.x").info("a line")
    warnings.warn("a warning", stacklevel=1)
    thread = threading.Thread(target=fail, args=("in a thread",), name="worker")
    thread.start()
    thread.join()
    Unraisable()
    gc.collect()
    os.write(2, b"from C++\n")
    print("to stderr", file=sys.stderr)
    faulthandler._sigsegv()
