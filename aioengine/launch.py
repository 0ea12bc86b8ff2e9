"""`python -m aioengine.launch`: one rank of a launch.

Environment → configuration → layout → model files; the rest of a rank's life is in `rank/`. The
process ends by `os._exit`: once outputs are closed and the log is flushed, nothing waits for a
thread that may be stuck in a collective.
"""

import asyncio
import faulthandler
import logging
import os
import sys
from typing import NoReturn

import setproctitle
import uvloop

from aioengine import (
    collector_paused,
    launched_by,
    openmp_waits,  # noqa: F401  # acts when imported
)
from aioengine.checkpoint.source import ModelSource
from aioengine.config import EngineConfig
from aioengine.control.signals import Signals
from aioengine.dist.launcher import choose_interface, read_environment, report_to_launcher
from aioengine.errors import EngineError, StartupError, innermost
from aioengine.flags import build_parser, parse_config
from aioengine.model_config import ModelConfig
from aioengine.rank.logs import set_up_logging
from aioengine.rank.model_files import find_model
from aioengine.rank.place import Place
from aioengine.rank.rank import (
    EXIT_LOST_PEER,
    EXIT_OK,
    EXIT_OWN_FAILURE,
    EXIT_STARTUP,
    Rank,
)

collector_paused.resume()
log = logging.getLogger("aioengine.launch")


def main() -> None:
    faulthandler.enable()  # a crash in C++ leaves the stacks
    parser = build_parser("python -m aioengine.launch", "Run one rank of a launch.")
    try:
        place, model, source = prepare(parse_config(parser, sys.argv[1:]))
    except (ValueError, EngineError) as error:
        print(f"{_whose()}aioengine: error: {error}", file=sys.stderr, flush=True)
        leave(EXIT_STARTUP)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        leave(runner.run(run_rank(place, model, source)))


def _whose() -> str:
    """For a line from before the log is set up: the rank, where a launcher started several."""
    try:
        env = read_environment(os.environ)
    except ValueError:
        return ""
    return f"[rank {env.rank}] " if env.world_size > 1 else ""


def leave(code: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def prepare(config: EngineConfig) -> tuple[Place, ModelConfig, ModelSource]:
    """Everything that can be wrong without meeting another rank. Raises ValueError."""
    place = Place.find(config, os.environ)
    if place.walltime.until_drain_s == 0:
        raise ValueError(
            f"--walltime-margin {config.walltime_margin:g}: nothing would be served; "
            f"{place.walltime.cause}"
        )
    place, model, source = find_model(place)
    set_up_logging(place)
    choose_interface(place.address)
    setproctitle.setproctitle(place.title)
    return place, model, source


async def run_rank(place: Place, model: ModelConfig, source: ModelSource) -> int:
    """The whole life of this rank; returns the exit status."""
    launcher_pid = launched_by.PID if place.env.kind != "none" else 0
    signals = Signals(place.config.shutdown_timeout, launcher_pid)
    rank = Rank(place, model, source, signals, leave)
    life = asyncio.current_task()
    assert life is not None
    signals.on_first = lambda: rank.on_drain_signal(life)
    signals.on_stuck_orphan = lambda: leave(EXIT_LOST_PEER)
    asyncio.get_running_loop().set_exception_handler(rank.on_loop_error)
    try:
        return await rank.live()
    except asyncio.CancelledError:
        log.info("stopped during start-up")
        return EXIT_OK
    except (EngineError, ExceptionGroup) as caught:
        error = innermost(caught)
        if isinstance(error, StartupError):
            log.error("%s", error)
            report_to_launcher(place.env, str(error))
            return EXIT_STARTUP
        log.error("this rank failed", exc_info=error)
        rank.say_first_failure(f"{place.info}: {type(error).__name__}: {error}")
        return EXIT_OWN_FAILURE


if __name__ == "__main__":
    main()
