"""The `aioengine` command: picks a subcommand and hands the rest of the line to its module."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from aioengine.flags import CommandParser


@dataclass(frozen=True, slots=True)
class Command:
    """A module with `configure(parser)` and `run(args) -> exit status`."""

    module: str
    summary: str


COMMANDS: Final = {
    "serve": Command("aioengine.cli.serve", "start every rank on this machine and serve a model"),
    "layout": Command("aioengine.cli.layout", "print ranks and groups of a launch, without one"),
    "version": Command("aioengine.cli.version", "print the version"),
}


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    name = _top_parser().parse_args(argv[:1]).command
    # Imported by name, and only the one that was asked for: `serve` brings torch, which takes
    # seconds, and `aioengine layout` must answer at once.
    module = importlib.import_module(COMMANDS[name].module)
    parser = CommandParser(prog=f"aioengine {name}", description=module.__doc__)
    module.configure(parser)
    status: int = module.run(parser.parse_args(argv[1:]))
    return status


def _top_parser() -> CommandParser:
    width = max(len(name) for name in COMMANDS)
    summaries = "\n".join(f"  {name:{width}}  {cmd.summary}" for name, cmd in COMMANDS.items())
    parser = CommandParser(
        prog="aioengine",
        usage="aioengine COMMAND ...",
        description=f"commands:\n{summaries}",
        epilog="aioengine COMMAND --help says what a command takes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=argparse.SUPPRESS)
    return parser
