"""Record the next steps of all ranks and write them as a trace for https://ui.perfetto.dev.

All ranks stand on one clock: ranks of one host share it, those of others are aligned by round
trips, and the trace's metadata say how well. What recording costs, `aioengine bench steps` says.
The server must have been started with --admin-api-key.
"""

import argparse
import base64
import json
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.text import Text

from aioengine.bench.steps_report import breakdown_table
from aioengine.cli import trace_server
from aioengine.cli.trace_server import UnreachableError, fetch
from aioengine.flags import CommandParser
from aioengine.limits import MAX_RECORDED_SECONDS, MAX_RECORDED_STEPS
from aioengine.timeline.breakdown import breakdown
from aioengine.timeline.chrome import RankRecording, to_chrome
from aioengine.timeline.clock import ClockOffset
from aioengine.trace_messages import (
    DEFAULT_RECORDED_SECONDS,
    DEFAULT_RECORDED_STEPS,
    RecordedSteps,
)

PROG: Final = "aioengine trace steps"
DEFAULT_OUTPUT: Final = "aioengine-steps.json"
PIPED_WIDTH: Final = 400
"""For output that is no terminal: nothing is cut."""
LAUNCH_NOTE: Final = (
    "times are of CLOCK_MONOTONIC on the host; on an accelerator, calls that only launch work take "
    "the time of launching"
)


def configure(parser: CommandParser) -> None:
    trace_server.configure(parser)
    steps, seconds = DEFAULT_RECORDED_STEPS, DEFAULT_RECORDED_SECONDS
    parser.add_argument("--steps", type=int, default=steps, metavar="N", help=f"[{steps}]")
    parser.add_argument(
        "--seconds",
        type=int,
        default=seconds,
        metavar="N",
        help=f"How long to wait for them [{seconds}].",
    )
    parser.add_argument("--replica", type=int, metavar="N", help="Only this one [all].")
    parser.add_argument(
        "--output", default=DEFAULT_OUTPUT, metavar="FILE", help=f"[{DEFAULT_OUTPUT}]"
    )


def run(args: argparse.Namespace) -> int:
    try:
        answer = fetch(args, _path(args), args.seconds)
        if getattr(args, "json", False):
            print(json.dumps(answer, indent=2))
            return 0
        recordings = list(read_recordings(answer))
        trace = to_chrome(recordings, _metadata(answer, recordings))
        Path(args.output).write_text(json.dumps(trace))
    except (ValueError, UnreachableError) as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{PROG}: error: --output {args.output}: {error.strerror}", file=sys.stderr)
        return 1
    print_summary(answer, recordings, args.output)
    return 0


def _path(args: argparse.Namespace) -> str:
    """Raises ValueError that names the flag."""
    for flag, value, most in (
        ("--steps", args.steps, MAX_RECORDED_STEPS),
        ("--seconds", args.seconds, MAX_RECORDED_SECONDS),
    ):
        if not 1 <= value <= most:
            raise ValueError(f"{flag} must be from 1 to {most}, found {value}")
    query = {"steps": args.steps, "seconds": args.seconds}
    if (replica := getattr(args, "replica", None)) is not None:
        query["replica"] = replica
    return f"/trace/steps?{urllib.parse.urlencode(query)}"


def read_recordings(answer: dict[str, Any]) -> Iterator[RankRecording]:
    """Of the ranks that have recorded; each shows the steps that all ranks of its replica have
    begun to record."""
    for rank in answer["ranks"]:
        if rank["error"] is not None:
            continue
        fields = {**rank["recorded"], "spans": base64.b64decode(rank["recorded"]["spans"])}
        recorded = msgspec.convert(fields, RecordedSteps)
        wanted = [step for step in recorded.steps if step.seq >= rank["first_seq"]]
        steps = wanted[: answer["steps"]]
        clock = ClockOffset(**rank["clock"])
        yield RankRecording(rank["rank"], rank["coords"], _title(rank), recorded, steps, clock)


def _title(rank: dict[str, Any]) -> str:
    return f"rank {rank['rank']} ({rank['coords']}) host {rank['host']} pid {rank['pid']}"


def _metadata(answer: dict[str, Any], recordings: list[RankRecording]) -> dict[str, Any]:
    """What the trace says of itself."""
    return {
        "clock": LAUNCH_NOTE,
        "clock_offsets": {
            recording.title: {
                "offset_ns": recording.clock.offset_ns,
                "error_bound_ns": recording.clock.error_ns,
            }
            for recording in recordings
        },
        "notes": list(notes(answer, recordings)),
    }


def notes(answer: dict[str, Any], recordings: list[RankRecording]) -> Iterator[str]:
    """What is not as it was asked for."""
    for rank in answer["ranks"]:
        if rank["error"] is not None:
            yield f"{_title(rank)}: {rank['error']}"
    for recording in recordings:
        if recording.recorded.error:
            yield f"{recording.title}: the recording ended early: {recording.recorded.error}"
        if recording.recorded.is_cut:
            yield f"{recording.title}: there was no room for all spans"
    fewest = min((len(recording.steps) for recording in recordings), default=0)
    if fewest < answer["steps"]:
        found = f"only {fewest} of {answer['steps']} steps" if fewest else "no step"
        yield f"{found} ran within {answer['seconds']} s on every rank"


def print_summary(answer: dict[str, Any], recordings: list[RankRecording], path: str) -> None:
    """A column per rank, what is not as it was asked for, and where the trace is."""
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    columns = {
        f"rank {recording.rank} ({recording.coords})": breakdown(
            recording.recorded, recording.steps
        )
        for recording in recordings
    }
    found = {name: column for name, column in columns.items() if not column.is_empty}
    if found:
        console.print(breakdown_table(found))
    for note in notes(answer, recordings):
        console.print(Text(note, style="yellow"), soft_wrap=True)
    console.print(f"{path}: open it at https://ui.perfetto.dev", soft_wrap=True)
