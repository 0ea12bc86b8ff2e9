"""Examine the ranks, hosts and network of a launch before it loads anything.

Started in the place of the real thing, with the same launcher and flags: torchrun … -m
aioengine.cli doctor -tp 2 -pp 2, or srun aioengine doctor …. Without a launcher it starts the ranks
on this machine. No weights are read. --startup-timeout-seconds (here 30 by default) bounds the wait
for the ranks; the rest takes less than half a minute. Exit status 1 on a fault, on every rank.
"""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from typing import Final, NoReturn

import setproctitle
import uvloop

from aioengine.cli.local_ranks import run_ranks
from aioengine.cli.rank_flags import to_argv
from aioengine.cli.serve import num_processes
from aioengine.config import EngineConfig, refuse_unsupported
from aioengine.dist.launcher import choose_interface, read_environment, report_to_launcher
from aioengine.doctor.examination import Examination
from aioengine.doctor.judge import exit_status, judge
from aioengine.doctor.report import as_json, print_report
from aioengine.doctor.visit import visit
from aioengine.errors import EngineError
from aioengine.flags import CommandParser, add_flags, config_from
from aioengine.rank.logs import set_up_logging
from aioengine.rank.place import Place

log = logging.getLogger(__name__)
DEFAULTS: Final = EngineConfig(startup_timeout_seconds=30.0, log_level="warning")
PROG: Final = "aioengine doctor"
EXIT_FAULT: Final = 1
END_S: Final = 10
"""For ranks on this machine, once they were told to end."""


def configure(parser: CommandParser) -> None:
    parser.add_argument(
        "model_argument", nargs="?", metavar="MODEL", help="Accepted, as by serve; not read."
    )
    parser.add_argument("--json", action="store_true", help="One JSON object instead of tables.")
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    given = vars(args)
    given.pop("model_argument", None)
    environ = dict(os.environ)
    try:
        config = config_from(given, DEFAULTS)
        refuse_unsupported(config)
        num_ranks = num_processes(config)
        if num_ranks > 1 and read_environment(environ).kind == "none":
            rank_argv = [sys.executable, "-m", "aioengine.cli", "doctor", *to_argv(given)]
            return run_ranks(PROG, rank_argv, num_ranks, END_S, names_first=False)
        place = Place.find(config, environ)
        set_up_logging(place)
    except ValueError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return EXIT_FAULT
    choose_interface(place.address)
    setproctitle.setproctitle(f"aioengine doctor {place.info.coords} (rank {place.rank})")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        _leave(_examine(runner, place, environ, as_object=given.get("json", False)))


def _examine(
    runner: asyncio.Runner, place: Place, environ: Mapping[str, str], *, as_object: bool
) -> int:
    def conclude(found: Examination) -> int:
        findings = judge(found)
        status = exit_status(findings)
        if as_object:
            print(as_json(found, findings, status), flush=True)
        else:
            print_report(found, findings, sys.stdout)
            sys.stdout.flush()
        return status

    try:
        status = runner.run(visit(place, environ, conclude))
    except EngineError as error:
        log.error("%s", error)
        report_to_launcher(place.env, str(error))
        return EXIT_FAULT
    if status:
        report_to_launcher(place.env, "aioengine doctor found a fault: see rank 0's report")
    return status


def _leave(status: int) -> NoReturn:
    """Without waiting for a device thread that may be stuck."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
