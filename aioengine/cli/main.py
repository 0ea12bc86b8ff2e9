"""The `aioengine` command."""

import sys
from collections.abc import Sequence
from typing import Final

from aioengine import openmp_waits  # noqa: F401  # acts when imported
from aioengine.cli.commands import Command, dispatch

COMMANDS: Final = {
    "serve": Command("aioengine.cli.serve", "start every rank on this machine and serve a model"),
    "layout": Command("aioengine.cli.layout", "print ranks and groups of a launch, without one"),
    "doctor": Command("aioengine.cli.doctor", "examine ranks, hosts and network of a launch"),
    "trace": Command("aioengine.cli.trace", "ask a launch that serves what its ranks are in"),
    "bench": Command("aioengine.cli.bench", "measure parts of the engine on this machine"),
    "version": Command("aioengine.cli.version", "print the version"),
}


def main(argv: Sequence[str] | None = None) -> int:
    return dispatch("aioengine", COMMANDS, sys.argv[1:] if argv is None else argv)
