"""What the ranks of a launch that serves are in, each question a module of its own."""

from typing import Final

from aioengine.cli.commands import Command

COMMANDS: Final = {
    "state": Command(
        "aioengine.cli.trace_state", "step, queue, last collective, loop lag of every rank"
    ),
    "stacks": Command("aioengine.cli.trace_stacks", "all threads of all ranks"),
    "steps": Command("aioengine.cli.trace_steps", "a timeline of the next steps, for Perfetto"),
}
