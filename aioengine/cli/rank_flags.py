"""The flags of commands that start ranks: read once here, and once more by every rank."""

import argparse
from typing import Any

from aioengine.flags import CommandParser


def add_model_argument(parser: CommandParser) -> None:
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="Same as --model.")


def given_flags(args: argparse.Namespace) -> dict[str, Any]:
    """What was typed, by name, with MODEL as `model`. Raises ValueError when it is there twice."""
    given = dict(vars(args))
    model = given.pop("model_argument", None)
    if model is not None and "model" in given:
        raise ValueError(f"--model {given['model']} and MODEL {model} are both given")
    if model is not None:
        given["model"] = model
    return given


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
