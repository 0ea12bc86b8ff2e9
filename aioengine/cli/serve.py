"""Serve a model on this machine: starts every rank as torchrun would and stays until they end."""

import argparse
import importlib
import os
import sys
from typing import Final

from aioengine.cli.rank_flags import add_model_argument, given_flags, to_argv
from aioengine.config import EngineConfig, refuse_unsupported
from aioengine.flags import CommandParser, add_flags, config_from

RANK_MODULE: Final = "aioengine.launch"
LAUNCHER_MODULE: Final = "aioengine.cli.local_ranks"
"""Imported where several ranks are started: it brings torch, 2 s that one rank need not wait."""
KILL_MARGIN_S: Final = 10
"""How much longer than --shutdown-timeout a rank may take before it is killed."""


def configure(parser: CommandParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="Start all ranks again up to N times after one failed [0].",
    )
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    try:
        given = given_flags(args)
        max_restarts = given.pop("max_restarts")
        if max_restarts < 0:
            raise ValueError(f"--max-restarts must be at least 0, found {max_restarts}")
        config = config_from(given)
        refuse_unsupported(config)
    except ValueError as error:
        print(f"aioengine serve: error: {error}", file=sys.stderr)
        return 1
    rank_argv = [sys.executable, "-m", RANK_MODULE, *to_argv(given)]
    num_ranks = num_processes(config)
    if num_ranks == 1 and not max_restarts:
        os.execv(rank_argv[0], rank_argv)
    shutdown_timeout_s = int(config.shutdown_timeout) + KILL_MARGIN_S
    status: int = importlib.import_module(LAUNCHER_MODULE).run_ranks(
        "aioengine serve",
        rank_argv,
        num_ranks,
        shutdown_timeout_s,
        max_restarts=max_restarts,
        drains=True,
    )
    return status


def num_processes(config: EngineConfig) -> int:
    """Ranks to start; without --data-parallel-size there is one replica."""
    dp_size = 1 if config.data_parallel_size == "auto" else config.data_parallel_size
    return config.tensor_parallel_size * config.pipeline_parallel_size * dp_size
