"""Where a step's time goes, on every rank.

Runs an engine as `bench throughput` does, in this process, on ranks that it starts, or as one of
those that a launcher started. Prompts are computed once; then the same requests decode again and
again, from the prefix cache, by turns without and with a recording, so that it also says what
recording costs. With data parallelism every replica prints its own tables.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

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
from aioengine.bench.steps_report import Measured, RankShare, print_json, print_tables
from aioengine.config import EngineConfig
from aioengine.dist.launcher import read_environment
from aioengine.embedded.engine import AsyncEngine
from aioengine.errors import EngineError
from aioengine.flags import CommandParser
from aioengine.rank.recording import StepRecorder
from aioengine.timeline.breakdown import Breakdown, breakdown, mean, steady_decodes

PROG: Final = "aioengine bench steps"
SWEEP_STREAMS: Final = (1, 4, 16, 64, 256)
SWEEP_LENGTHS: Final = (128, 512, 2048, 8192)
WARM_UP_TOKENS: Final = 2
"""Of each stream, while the prompts are computed."""


@dataclass(frozen=True, slots=True)
class Shape:
    num_streams: int
    input_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure, checked."""

    config: EngineConfig
    shapes: tuple[Shape, ...]
    output_len: int
    num_rounds: int
    prompt_ids: Span
    is_sweep: bool

    def shapes_within(self, context: int) -> tuple[Shape, ...]:
        """Those to measure. One that is too long for the model gets shorter in a sweep; else there
        are none then."""
        longest = context - self.output_len
        if longest >= max(shape.input_len for shape in self.shapes):
            return self.shapes
        if not self.is_sweep or longest < 1:
            return ()
        cut = [Shape(each.num_streams, min(each.input_len, longest)) for each in self.shapes]
        return tuple(dict.fromkeys(cut))


def configure(parser: CommandParser) -> None:
    work = parser.add_argument_group("work")
    work.add_argument(
        "--num-streams", default="1,32", metavar="N[,N…]", help="requests that decode [1,32]"
    )
    work.add_argument(
        "--input-len",
        default="128",
        metavar="N[,N…]",
        help="tokens of a prompt; further lengths are measured with the first --num-streams [128]",
    )
    work.add_argument(
        "--output-len", type=int, default=32, metavar="N", help="tokens of an answer [32]"
    )
    work.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="of each kind, by turns [3]"
    )
    work.add_argument(
        "--sweep",
        action="store_true",
        default=False,
        help=f"cost of growth: {SWEEP_STREAMS[0]} to {SWEEP_STREAMS[-1]} streams, prompts of "
        f"{SWEEP_LENGTHS[0]} to {SWEEP_LENGTHS[-1]:,} tokens",
    )
    work.add_argument(
        "--prompt-ids", default="100-500", metavar="N-M", help="ids that prompts are of [100-500]"
    )
    work.add_argument(
        "--json", action="store_true", default=False, help="one JSON object instead of tables"
    )
    add_engine_flags(parser, without=frozenset({"enable_prefix_caching"}))


def run(args: argparse.Namespace) -> int:
    try:
        plan = read_plan(args)
        env = read_environment(os.environ)
    except ValueError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 1
    config = plan.config
    dp_size = 1 if config.data_parallel_size == "auto" else config.data_parallel_size
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size * dp_size
    show = print_json if args.json else print_tables
    return run_on_ranks("steps", args, env, num_ranks, partial(measure, plan), show)


def read_plan(args: argparse.Namespace) -> Plan:
    """Raises ValueError that names the flag."""
    streams = _numbers("--num-streams", args.num_streams)
    lengths = _numbers("--input-len", args.input_len)
    if args.sweep:
        streams, lengths = SWEEP_STREAMS, SWEEP_LENGTHS
    for flag, value, least in (("--output-len", args.output_len, 8), ("--rounds", args.rounds, 1)):
        if value < least:
            raise ValueError(f"{flag} must be {least} or more, found {value}")
    config = msgspec.structs.replace(engine_config(args), enable_prefix_caching=True)
    if max(streams) > config.num_slots:
        raise ValueError(
            f"--num-streams {max(streams)}: only {config.num_slots} requests run at the same time "
            "(--max-num-seqs, --max-num-batched-tokens)"
        )
    growing = [Shape(num_streams, lengths[0]) for num_streams in streams]
    longer = [Shape(streams[0], length) for length in lengths[1:]]
    return Plan(
        config=config,
        shapes=(*growing, *longer),
        output_len=args.output_len,
        num_rounds=args.rounds,
        prompt_ids=Span.parse("--prompt-ids", args.prompt_ids, at_least=0),
        is_sweep=args.sweep,
    )


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    """`1,32`. Raises ValueError that names the flag."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise ValueError(f"{flag}: expected numbers from 1 on such as 1,32, got {text!r}")
    return numbers


# --- what every rank does when its leader asks ----------------------------------------------------


@dataclass(slots=True)
class _Here:
    """Of the one engine in this process: `collective_rpc` names a function, so there is no one to
    hand it to."""

    recorder: StepRecorder | None = None


_here: Final = _Here()


def device_cpu_s(worker: Any) -> float:
    """What this rank's device thread has computed so far."""
    return time.thread_time()


def begin_recording(worker: Any) -> None:
    assert _here.recorder is not None
    _here.recorder.begin()


def end_recording(worker: Any, num_streams: int, num_microbatches: int) -> dict[str, Any]:
    """This rank's share of the steps in which all streams decoded."""
    assert _here.recorder is not None
    recorded = _here.recorder.result()
    _here.recorder.end()
    if recorded.error:
        raise EngineError(recorded.error)
    steps = steady_decodes(recorded.steps, num_streams, num_microbatches)
    share = breakdown(recorded, steps)
    return {
        "rank": worker.rank,
        "coords": str(worker.coords),
        "breakdown": msgspec.to_builtins(share),
    }


# --- the leader -----------------------------------------------------------------------------------


async def measure(plan: Plan) -> list[Measured] | None:
    """Every rank of the launch calls it; leaders get the figures. Raises ValueError for what does
    not fit the model, when the engine has ended in order."""
    async with AsyncEngine(plan.config) as engine:
        _here.recorder = engine.step_recorder
        async with engine.active():
            if not engine.is_leader:
                return None
            context = engine.max_model_len
            shapes = plan.shapes_within(context)
            measured = [await _measure(engine, plan, shape) for shape in shapes]
    if not measured:
        longest = max(shape.input_len for shape in plan.shapes) + plan.output_len
        raise ValueError(
            f"--input-len and --output-len come to {longest} tokens, the context is {context}"
        )
    return measured


class _Round(NamedTuple):
    step_ms: float
    """The median."""
    cpu_s: float
    """Of the device threads of all ranks."""


async def _measure(engine: AsyncEngine, plan: Plan, shape: Shape) -> Measured:
    num_streams = shape.num_streams
    num_microbatches = min(plan.config.pipeline_parallel_size, num_streams)
    prompts = random_prompts(plan.config.seed, plan.prompt_ids, [shape.input_len] * num_streams)
    output_lens = [plan.output_len] * num_streams
    await generate_all(engine, prompts, [WARM_UP_TOKENS] * num_streams)

    async def generate() -> _Round:
        take_steps()
        before_s = sum(await engine.collective_rpc(device_cpu_s))
        await generate_all(engine, prompts, output_lens)
        cpu_s = sum(await engine.collective_rpc(device_cpu_s)) - before_s
        return _Round(_period_ms(take_steps(), num_streams, num_microbatches), cpu_s)

    plain: list[_Round] = []
    recorded: list[_Round] = []
    shares: list[dict[str, Any]] = []
    for _ in range(plan.num_rounds):
        plain.append(await generate())
        await engine.collective_rpc(begin_recording)
        recorded.append(await generate())
        shares += await engine.collective_rpc(end_recording, (num_streams, num_microbatches))
    return Measured(
        num_streams=num_streams,
        input_len=shape.input_len,
        output_len=plan.output_len,
        num_microbatches=num_microbatches,
        replica=engine.coords.dp,
        step_ms=statistics.median(each.step_ms for each in plain),
        recorded_step_ms=statistics.median(each.step_ms for each in recorded),
        cost=_cost([each.step_ms for each in plain], [each.step_ms for each in recorded]),
        cpu_cost=_cost([each.cpu_s for each in plain], [each.cpu_s for each in recorded]),
        ranks=_by_rank(shares),
    )


def _cost(plain: Sequence[float], recorded: Sequence[float]) -> float:
    """What recording adds, as a share: the median over pairs of rounds."""
    return statistics.median(
        after / before - 1 if before else 0.0 for before, after in zip(plain, recorded, strict=True)
    )


def _period_ms(steps: Sequence[Step], num_streams: int, num_microbatches: int) -> float:
    """The median time between the results of two steps in which all streams decode; 0 if there are
    none. Microbatches take turns, so a period is what so many steps take, divided."""
    ended_s = [step.ended_s for step in steady_decodes(steps, num_streams, num_microbatches)]
    turns_s = [
        later - earlier for earlier, later in zip(ended_s, ended_s[num_microbatches:], strict=False)
    ]
    return statistics.median(turns_s) / num_microbatches * 1e3 if turns_s else 0.0


def _by_rank(shares: Sequence[dict[str, Any]]) -> list[RankShare]:
    """Of all rounds together."""
    ranks = sorted({(share["rank"], share["coords"]) for share in shares})
    return [
        RankShare(
            rank,
            coords,
            mean(
                msgspec.convert(share["breakdown"], Breakdown)
                for share in shares
                if share["rank"] == rank
            ),
        )
        for rank, coords in ranks
    ]
