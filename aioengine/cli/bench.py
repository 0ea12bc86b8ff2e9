"""Measurements, each a module of its own."""

from typing import Final

from aioengine.cli.commands import Command

COMMANDS: Final = {
    "serve": Command(
        "aioengine.bench.serve", "load on a server, or on two by turns: rates and latencies"
    ),
    "throughput": Command(
        "aioengine.bench.throughput", "many prompts at once, without HTTP: tokens/s, steps"
    ),
    "steps": Command(
        "aioengine.bench.steps", "where a step's time goes on every rank, and how it grows"
    ),
    "roofline": Command(
        "aioengine.bench.roofline", "this machine's limits, and what share the engine reaches"
    ),
    "collectives": Command(
        "aioengine.bench.collectives", "time collectives, backends side by side"
    ),
}
