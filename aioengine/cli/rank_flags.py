"""The flags of commands that start ranks: read once here, and once more by every rank."""

import argparse
import re
from typing import Any, Final

from aioengine.flags import CommandParser

MODEL: Final = re.compile(r".*\.gguf|\.{0,2}/.*|[\w.-]+/[\w./@:-]+")
"""A file, a directory or a hub id."""


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
    if "model" not in given:
        _check_not_swallowed(given)
    return given


def _check_not_swallowed(given: dict[str, Any]) -> None:
    """Of `--api-key K MODEL` both words are keys, says argparse; nobody means that."""
    for name, words in given.items():
        if isinstance(words, list) and len(words) > 1 and MODEL.fullmatch(words[-1]):
            flag = "--" + name.replace("_", "-")
            raise ValueError(
                f"{flag}: its last word, {words[-1]!r}, looks like MODEL, which must come before "
                f"{flag}; a word that is none can be given as {flag}={words[-1]}, with --model"
            )


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
