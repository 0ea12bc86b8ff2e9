"""Measurements, each a module of its own."""

from typing import Final

from aioengine.cli.commands import Command

COMMANDS: Final = {
    "collectives": Command(
        "aioengine.cli.bench_collectives", "time collectives, backends side by side"
    ),
}
