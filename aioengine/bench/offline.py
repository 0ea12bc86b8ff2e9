"""An engine in this process for measurements: prompts in, and a record of every step."""

import argparse
import asyncio
import logging
import random
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

import msgspec
import uvloop

from aioengine.bench.load import Span
from aioengine.bench.step_work import Step
from aioengine.cli.local_ranks import end_with_parent, run_ranks
from aioengine.cli.rank_flags import add_model_argument, given_flags, to_argv
from aioengine.config import EngineConfig, refuse_unsupported
from aioengine.dist.launcher_env import LauncherEnv
from aioengine.embedded.engine import AsyncEngine
from aioengine.engine.executor import Executor, StepDone, StepFailed
from aioengine.errors import EngineError, innermost
from aioengine.flags import CommandParser, add_flags, config_from
from aioengine.frontend.sampling import SamplingParams
from aioengine.messages import StepPlan

SHUTDOWN_TIMEOUT_S: Final = 10
SWITCHES: Final = ("json", "sweep")
"""Flags without a value, and without a --no- form."""
EXECUTOR: Final = "distributed_executor_backend"
WITHOUT_MEANING: Final = frozenset(
    {
        *("host", "port", "endpoint_file", "api_ranks", "api_key", "admin_api_key", "root_path"),
        *("uds", "ssl_certfile", "ssl_keyfile", "allowed_origins"),
        *("enable_log_requests", "max_log_len"),
        *("metrics_require_key", "max_concurrent_requests", "served_model_name", "chat_template"),
        *("shutdown_timeout", "walltime_margin", "kill_frozen", "log_dir", "log_level"),
        EXECUTOR,
    }
)
"""Settings of `aioengine serve` that an engine without HTTP and signals, or this module, has no
use for."""


def add_engine_flags(parser: CommandParser, without: frozenset[str] = frozenset()) -> None:
    """MODEL, and the settings that mean something offline."""
    add_model_argument(parser)
    fields = set(EngineConfig.__struct_fields__) - WITHOUT_MEANING - without
    add_flags(parser, only=fields)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Of parsed flags; steps are recorded. Raises ValueError that names the flag."""
    config = config_from(given_flags(args))
    refuse_unsupported(config)
    if config.distributed_executor_backend != "auto":
        raise ValueError("--config: distributed_executor_backend: this command brings its own")
    recorder = f"{__name__}:{RecordingExecutor.__name__}"
    return msgspec.structs.replace(config, **{EXECUTOR: recorder})


# --- processes ---------------------------------------------------------------------------------

Found = TypeVar("Found")


def run_on_ranks(
    command: str,
    args: argparse.Namespace,
    env: LauncherEnv,
    num_ranks: int,
    measure: Callable[[], Coroutine[Any, Any, Found | None]],
    show: Callable[[Found], None],
) -> int:
    """The exit status of a measurement on so many ranks: of which this process is one when a
    launcher started it, or none are needed beside it; else it starts them. Ranks whose `measure`
    gives None show nothing."""
    prog = f"aioengine bench {command}"
    if env.kind == "none" and num_ranks > 1:
        argv = [sys.executable, "-m", "aioengine.cli", "bench", command, *_line_again(args)]
        return run_ranks(prog, argv, num_ranks, SHUTDOWN_TIMEOUT_S)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if env.kind != "none":
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches ranks, too
        end_with_parent()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = runner.run(measure())
    except (EngineError, ValueError) as error:
        print(f"{prog}: error: rank {env.rank}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    if found is not None:
        show(found)
    return 0


def _line_again(args: argparse.Namespace) -> list[str]:
    given = given_flags(args)
    switches = [f"--{name}" for name in SWITCHES if given.pop(name, False)]
    return [*to_argv(given), *switches]


# --- steps ---------------------------------------------------------------------------------------


_finished: list[tuple[float, StepPlan]] = []
"""Of the one engine in this process: the flag names a class, so there is no one to hand it to."""


class RecordingExecutor(Executor):
    """Ours; notes when each plan's result came."""

    def __init__(self, *, on_step: Any, **parts: Any) -> None:
        def note(step: StepDone | StepFailed) -> None:
            _finished.append((time.perf_counter(), step.plan))
            on_step(step)

        super().__init__(on_step=note, **parts)


def take_steps() -> list[Step]:
    """Those that have ended since the last call. On the leader."""
    steps = [Step.of(ended_s, plan) for ended_s, plan in _finished]
    _finished.clear()
    return steps


# --- requests ------------------------------------------------------------------------------------


def random_prompts(seed: int, prompt_ids: Span, lengths: Sequence[int]) -> list[list[int]]:
    draw = random.Random(seed)
    return [[prompt_ids.draw(draw) for _ in range(length)] for length in lengths]


async def generate_all(
    engine: AsyncEngine, prompts: Sequence[Sequence[int]], output_lens: Sequence[int]
) -> int:
    """Greedy answers of exactly these lengths, all at once; how many tokens came. In a phase.

    Raises the first error as it is.
    """

    async def answer(prompt: Sequence[int], length: int) -> int:
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        (update,) = await engine.generate(prompt, params).collect()
        return len(update.token_ids)

    try:
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(answer(prompt, length))
                for prompt, length in zip(prompts, output_lens, strict=True)
            ]
    except ExceptionGroup as group:
        raise innermost(group) from None
    return sum(task.result() for task in asked)
