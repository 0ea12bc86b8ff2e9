"""Serve a model on this machine: starts every rank as torchrun would and stays until they end."""

import argparse
import os
import sys
from typing import Any, Final

from aioengine.cli.local_ranks import run_ranks
from aioengine.config import EngineConfig, refuse_unsupported
from aioengine.flags import CommandParser, add_flags, config_from

RANK_MODULE: Final = "aioengine.launch"
KILL_MARGIN_S: Final = 10
"""How much longer than --shutdown-timeout a rank may take before it is killed."""


def configure(parser: CommandParser) -> None:
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="Same as --model.")
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    given = vars(args)
    model = given.pop("model_argument", None)
    try:
        if model is not None and "model" in given:
            raise ValueError(f"--model {given['model']} and MODEL {model} are both given")
        if model is not None:
            given["model"] = model
        config = config_from(given)
        refuse_unsupported(config)
    except ValueError as error:
        print(f"aioengine serve: error: {error}", file=sys.stderr)
        return 1
    rank_argv = [sys.executable, "-m", RANK_MODULE, *to_argv(given)]
    num_ranks = num_processes(config)
    if num_ranks == 1:
        os.execv(rank_argv[0], rank_argv)
    shutdown_timeout_s = int(config.shutdown_timeout) + KILL_MARGIN_S
    return run_ranks("aioengine serve", rank_argv, num_ranks, shutdown_timeout_s, drains=True)


def num_processes(config: EngineConfig) -> int:
    """Ranks to start; without --data-parallel-size there is one replica."""
    dp_size = 1 if config.data_parallel_size == "auto" else config.data_parallel_size
    return config.tensor_parallel_size * config.pipeline_parallel_size * dp_size


def to_argv(given: dict[str, Any]) -> list[str]:
    """The parsed flags as a command line again, for the ranks."""
    argv = []
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            argv += [f"--{flag}={item}" for item in value]
        else:
            argv.append(f"--{flag}={value}")
    return argv
