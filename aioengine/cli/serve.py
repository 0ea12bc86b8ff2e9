"""Serve a model on this machine: starts every rank as torchrun would and stays until they end."""

import argparse
import os
import signal
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any, Final

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

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
    return launch(rank_argv, num_ranks, int(config.shutdown_timeout) + KILL_MARGIN_S)


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
        else:
            argv.append(f"--{flag}={value}")
    return argv


def launch(rank_argv: list[str], num_ranks: int, shutdown_timeout_s: int) -> int:
    """Run torchrun's elastic agent in this process; returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="aioengine-") as log_dir:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=log_dir),
            shutdown_timeout=shutdown_timeout_s,
        )
        try:
            elastic_launch(config, rank_argv[0])(*rank_argv[1:])
        except ChildFailedError as failed:
            rank, failure = failed.get_first_failure()
            print(
                f"aioengine serve: rank {rank} (pid {failure.pid}) ended first, with status "
                f"{failure.exitcode}; its log lines say why",
                file=sys.stderr,
            )
            return 1
        except SignalException as stopped:
            asked = stopped.sigval in (signal.SIGTERM, signal.SIGINT)
            any_failed = any(Path(log_dir).rglob("error.json"))
            return 0 if asked and not any_failed else 1
    return 0
