"""How near does the engine come to what this machine can do?

Measures how quickly memory is read and how quickly matrices of the model's shapes are multiplied,
then runs the engine in this process, and says what share of these limits its decode and prefill
reach. On CPU, one rank. The limits are measured before and after the engine; the better counts.
"""

import argparse
import asyncio
import logging
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import uvloop

from aioengine.bench.load import Span
from aioengine.bench.offline import (
    add_engine_flags,
    engine_config,
    generate_all,
    random_prompts,
    take_steps,
)
from aioengine.bench.roofline_machine import (
    DTYPES,
    MEMORY_BYTES,
    USUAL_DTYPES,
    Machine,
    measure_machine,
)
from aioengine.bench.roofline_report import Report, print_report, to_json
from aioengine.bench.roofline_work import Model, Phase, judge
from aioengine.bench.step_work import Step, full_decodes
from aioengine.checkpoint.source import read_model_config, resolve_model
from aioengine.cli.layout_model import kv_shape, stage_plan
from aioengine.config import EngineConfig
from aioengine.core.stages import split_layers
from aioengine.dist.launcher import read_environment
from aioengine.embedded.engine import AsyncEngine
from aioengine.errors import EngineError
from aioengine.flags import CommandParser
from aioengine.worker.device import set_cpu_threads
from aioengine.worker.loading import with_formats

PROG: Final = "aioengine bench roofline"
ONE_RANK: Final = frozenset(
    {
        *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
        *("prefill_context_parallel_size", "decode_context_parallel_size"),
        *("external_data_parallel_size", "pipeline_layers", "enable_expert_parallel"),
        *("disable_custom_all_reduce", "enable_prefix_caching", "device", "host_ip"),
    }
)
"""Settings of launches with several ranks or other devices; and prompts here are all different."""
STREAMS: Final = (1, 32)
PROMPT_LEN, OUTPUT_LEN = 128, 32
"""Of a decode, in tokens."""
PREFILL_LEN: Final = 2047
NUM_REPEATS: Final = 3
PROMPT_IDS: Final = Span(100, 500)
"""Less where the vocabulary is smaller."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """In tokens; shorter where the model's context is."""

    prompt: int
    output: int
    prefill: int

    @classmethod
    def within(cls, context: int) -> "Lengths":
        prompt, output = min(PROMPT_LEN, context // 2), min(OUTPUT_LEN, context // 4)
        return cls(prompt, output, min(PREFILL_LEN, context - 1))


def configure(parser: CommandParser) -> None:
    parser.add_argument(
        "--json", action="store_true", default=False, help="one JSON object instead of tables"
    )
    add_engine_flags(parser, without=ONE_RANK)


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        config = msgspec.structs.replace(
            engine_config(args), enable_prefix_caching=False, device="cpu"
        )
        env = read_environment(os.environ)
        if env.world_size > 1:
            raise ValueError(f"{env.kind} started {env.world_size} ranks, and this measures one")
        model = read_model(config)
        num_threads = set_cpu_threads(config.cpu_threads, env.omp_num_threads, 0, 1)
        machine = _measure_machine(model, num_threads)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            phases = runner.run(measure_engine(config, model))
        machine = machine.best_with(_measure_machine(model, num_threads))
    except (EngineError, ValueError) as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted", file=sys.stderr)
        return 130
    limits = machine.limits(model, num_threads)
    shares = tuple(judge(model, phase, limits) for phase in phases)
    report = Report(model.cfg.name, model.dtype, num_threads, model.read_bytes, machine, shares)
    if args.json:
        print(to_json(report))
    else:
        print_report(report)
    return 0


def read_model(config: EngineConfig) -> Model:
    """Reads no tensor. Raises ValueError or StartupError as a launch would."""
    source = resolve_model(config.model, config.startup_timeout_seconds)
    cfg = read_model_config(source)
    dtype_name = cfg.dtype if config.dtype == "auto" else config.dtype
    dtype = DTYPES[dtype_name]
    plan = with_formats(
        stage_plan(cfg, split_layers(cfg.num_layers, 1, None), 0, 1, dtype),
        source,
        config.quantization,
    )
    embedding = plan.outline().get_parameter("model.embed_tokens.weight")
    return Model(
        cfg,
        dtype_name,
        plan.num_bytes - (0 if cfg.tie_word_embeddings else embedding.nbytes),
        kv_shape(plan, block_size=1).block_bytes,
    )


def _measure_machine(model: Model, num_threads: int) -> Machine:
    dtypes = tuple(dict.fromkeys((*USUAL_DTYPES, model.dtype)))
    return measure_machine(model.cfg, (model.read_bytes, MEMORY_BYTES), num_threads, dtypes)


# --- the engine ----------------------------------------------------------------------------------


async def measure_engine(config: EngineConfig, model: Model) -> list[Phase]:
    async with AsyncEngine(config) as engine, engine.active():
        lengths = Lengths.within(engine.max_model_len)
        vocab_size = model.cfg.vocab_size
        ids = Span(min(PROMPT_IDS.least, vocab_size // 2), min(PROMPT_IDS.most, vocab_size - 1))
        phases = [await _decode(engine, lengths, ids, streams) for streams in STREAMS]
        phases.append(await _prefill(engine, lengths, ids))
    return phases


async def _decode(engine: AsyncEngine, lengths: Lengths, ids: Span, num_streams: int) -> Phase:
    """The step that takes the median time, of those in which all streams get a token."""
    timed: list[tuple[float, Step]] = []
    for number in range(NUM_REPEATS):
        prompts = random_prompts(number, ids, [lengths.prompt] * num_streams)
        take_steps()
        await generate_all(engine, prompts, [lengths.output] * num_streams)
        timed += full_decodes(take_steps(), num_streams)
    seconds = statistics.median_low(taken_s for taken_s, _ in timed)
    step = next(step for taken_s, step in timed if taken_s == seconds)
    name = f"decode, {num_streams} stream{'s' if num_streams > 1 else ''}"
    return Phase(name, [step], seconds, num_streams)


async def _prefill(engine: AsyncEngine, lengths: Lengths, ids: Span) -> Phase:
    """From the call to the first token."""
    taken_s: list[float] = []
    steps: Sequence[Step] = []
    for number in range(NUM_REPEATS + 1):
        prompts = random_prompts(number, ids, [lengths.prefill])
        take_steps()
        began_s = time.perf_counter()
        await generate_all(engine, prompts, [1])
        steps = [step for step in take_steps() if not step.is_decode]
        taken_s.append(steps[-1].ended_s - began_s)
    # The first one warms up.
    seconds = statistics.median(taken_s[1:])
    return Phase(f"prefill, {lengths.prefill:,} tokens", steps, seconds, lengths.prefill)
