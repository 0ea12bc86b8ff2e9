"""A table of commands: picks the typed one and hands the rest of the line to its module."""

import argparse
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aioengine.flags import CommandParser


@dataclass(frozen=True, slots=True)
class Command:
    """A module with `configure(parser)` and `run(args) -> exit status`, or with COMMANDS of its
    own."""

    module: str
    summary: str


def dispatch(prog: str, commands: Mapping[str, Command], argv: Sequence[str]) -> int:
    """The exit status."""
    if not argv:
        _parser(prog, commands).print_help()
        return 1
    name = _parser(prog, commands).parse_args(argv[:1]).command
    # Imported by name, and only the one that was asked for: `bench` brings torch, which takes
    # seconds, and `aioengine layout` must answer at once.
    module = importlib.import_module(commands[name].module)
    prog = f"{prog} {name}"
    if (nested := getattr(module, "COMMANDS", None)) is not None:
        return dispatch(prog, nested, argv[1:])
    parser = CommandParser(prog=prog, description=module.__doc__)
    module.configure(parser)
    status: int = module.run(parser.parse_args(argv[1:]))
    return status


def _parser(prog: str, commands: Mapping[str, Command]) -> CommandParser:
    width = max(len(name) for name in commands)
    summaries = "\n".join(f"  {name:{width}}  {cmd.summary}" for name, cmd in commands.items())
    parser = CommandParser(
        prog=prog,
        usage=f"{prog} COMMAND ...",
        description=f"commands:\n{summaries}",
        epilog=f"{prog} COMMAND --help says what a command takes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", metavar="COMMAND", choices=commands, help=argparse.SUPPRESS)
    return parser
