"""Generate for many prompts at once, without HTTP: tokens/s, and what a step is made of.

In this process; with tensor or pipeline parallel sizes above 1 it starts its ranks itself, or is
one when torchrun (or another launcher) started it. Answers are greedy and have exactly the length
that is asked for.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from aioengine.bench.load import Span
from aioengine.bench.offline import (
    add_engine_flags,
    engine_config,
    generate_all,
    random_prompts,
    run_on_ranks,
    take_steps,
)
from aioengine.bench.step_work import Step
from aioengine.config import EngineConfig
from aioengine.dist.launcher import read_environment
from aioengine.embedded.engine import AsyncEngine
from aioengine.flags import CommandParser

PROG: Final = "aioengine bench throughput"
PIPED_WIDTH: Final = 160
"""Columns where no terminal says how many there are."""
NUM_WARM_UP, WARM_UP_TOKENS = 4, 8
"""Prompts of the shortest length, and tokens for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure, checked."""

    config: EngineConfig
    num_prompts: int
    input_len: Span
    output_len: Span
    prompt_ids: Span


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Of the steps of one kind. What lies between two steps counts for the later one."""

    count: int
    mean_requests: float
    mean_tokens: float
    median_ms: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    wall_s: float
    num_input_tokens: int
    num_output_tokens: int
    input_tokens_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    steps: dict[str, StepFigures]
    """By kind: decode (one token for each request), or prefill (of some request)."""


def configure(parser: CommandParser) -> None:
    work = parser.add_argument_group("work")
    work.add_argument("--num-prompts", type=int, default=64, metavar="N", help="[64]")
    work.add_argument(
        "--input-len", default="128", metavar="N|N-M", help="tokens of a prompt [128]"
    )
    work.add_argument(
        "--output-len", default="128", metavar="N|N-M", help="tokens of an answer [128]"
    )
    work.add_argument(
        "--prompt-ids", default="100-500", metavar="N-M", help="ids that prompts are of [100-500]"
    )
    work.add_argument(
        "--json", action="store_true", default=False, help="one JSON object instead of tables"
    )
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    try:
        plan = read_plan(args)
        env = read_environment(os.environ)
        config = plan.config
        num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
        if config.data_parallel_size not in ("auto", 1) or env.world_size not in (1, num_ranks):
            raise ValueError(
                f"this measures one replica, of tp × pp = {num_ranks} ranks; there are "
                f"{env.world_size} (data parallel {config.data_parallel_size}). `aioengine bench "
                "serve` measures several"
            )
    except ValueError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 1
    show = print_json if args.json else print_tables
    return run_on_ranks(
        "throughput", args, env, num_ranks, partial(measure, plan), partial(show, plan)
    )


def read_plan(args: argparse.Namespace) -> Plan:
    """Raises ValueError that names the flag."""
    if args.num_prompts < 1:
        raise ValueError(f"--num-prompts must be 1 or more, found {args.num_prompts}")
    return Plan(
        config=engine_config(args),
        num_prompts=args.num_prompts,
        input_len=Span.parse("--input-len", args.input_len),
        output_len=Span.parse("--output-len", args.output_len),
        prompt_ids=Span.parse("--prompt-ids", args.prompt_ids, at_least=0),
    )


async def measure(plan: Plan) -> Result | None:
    """Every rank of the replica calls it; the leader gets the figures. Raises ValueError for what
    does not fit the model, when the engine has ended in order."""
    async with AsyncEngine(plan.config) as engine, engine.active():
        if not engine.is_leader:
            return None
        context = engine.max_model_len
        longest = plan.input_len.most + plan.output_len.most
        result = await _measure(engine, plan) if longest <= context else None
    if result is None:
        raise ValueError(
            f"--input-len and --output-len come to {longest} tokens, the context is {context}"
        )
    return result


async def _measure(engine: AsyncEngine, plan: Plan) -> Result:
    draw = random.Random(plan.config.seed)
    lengths = [plan.input_len.draw(draw) for _ in range(plan.num_prompts)]
    output_lens = [plan.output_len.draw(draw) for _ in range(plan.num_prompts)]
    shortest = [plan.input_len.least] * NUM_WARM_UP
    warm_up = random_prompts(plan.config.seed + 1, plan.prompt_ids, shortest)
    num_tokens = min(WARM_UP_TOKENS, plan.output_len.least)
    await generate_all(engine, warm_up, [num_tokens] * NUM_WARM_UP)
    prompts = random_prompts(plan.config.seed, plan.prompt_ids, lengths)
    take_steps()
    began_s = time.perf_counter()
    num_output = await generate_all(engine, prompts, output_lens)
    wall_s = time.perf_counter() - began_s
    return summarize(began_s, wall_s, sum(lengths), num_output, take_steps())


def summarize(
    began_s: float, wall_s: float, num_input: int, num_output: int, steps: Sequence[Step]
) -> Result:
    ended_s = [began_s, *(step.ended_s for step in steps)]
    taken_s = [later - earlier for earlier, later in itertools.pairwise(ended_s)]
    timed = list(zip(steps, taken_s, strict=True))
    kinds = {
        "prefill": [(step, s) for step, s in timed if not step.is_decode],
        "decode": [(step, s) for step, s in timed if step.is_decode],
    }
    return Result(
        wall_s=wall_s,
        num_input_tokens=num_input,
        num_output_tokens=num_output,
        input_tokens_per_s=num_input / wall_s,
        output_tokens_per_s=num_output / wall_s,
        total_tokens_per_s=(num_input + num_output) / wall_s,
        steps={kind: _step_figures(found) for kind, found in kinds.items() if found},
    )


def _step_figures(timed: Sequence[tuple[Step, float]]) -> StepFigures:
    return StepFigures(
        len(timed),
        statistics.fmean(step.num_requests for step, _ in timed),
        statistics.fmean(step.num_tokens for step, _ in timed),
        statistics.median(s for _, s in timed) * 1e3,
        sum(s for _, s in timed),
    )


# --- what a person, or a program, gets to see ----------------------------------------------------


def print_tables(plan: Plan, result: Result) -> None:
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    console = Console(width=width, markup=False, highlight=False)
    console.print(
        f"{plan.num_prompts} prompts, {result.num_input_tokens:,} tokens in and "
        f"{result.num_output_tokens:,} out, in {result.wall_s:.2f} s\n"
        f"{result.input_tokens_per_s:,.1f} tokens/s in · {result.output_tokens_per_s:,.1f} out · "
        f"{result.total_tokens_per_s:,.1f} together",
        soft_wrap=True,
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("steps")
    for column in ("count", "requests, mean", "tokens, mean", "ms, median", "seconds"):
        table.add_column(column, justify="right")
    for kind, found in result.steps.items():
        means = (f"{found.mean_requests:,.1f}", f"{found.mean_tokens:,.1f}")
        times = (f"{found.median_ms:,.2f}", f"{found.total_s:,.2f}")
        table.add_row(kind, f"{found.count:,}", *means, *times)
    console.print(table)


def print_json(plan: Plan, result: Result) -> None:
    work = {"num_prompts": plan.num_prompts, "input_len": str(plan.input_len)}
    work["output_len"] = str(plan.output_len)
    print(json.dumps({**work, **asdict(result)}))
