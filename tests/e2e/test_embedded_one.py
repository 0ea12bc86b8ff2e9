"""AsyncEngine in this very process: one rank, no launcher."""

import asyncio
import gc
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import rpc_methods
from support.launching import STORIES, golden

from aioengine import AsyncEngine, EngineConfig, SamplingParams
from aioengine.errors import (
    EngineError,
    ReplicaFailedError,
    RequestFailedError,
    StartupError,
    WorkerError,
)

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")

ROW = golden("stories260k_greedy")[0]
GREEDY = SamplingParams(temperature=0, max_tokens=len(ROW["token_ids"]))
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[AsyncEngine]:
    few = {"model": str(STORIES), "cpu_threads": 1, "kv_cache_memory_bytes": 2**22}
    config = EngineConfig(**{**few, **settings})
    async with AsyncEngine(config) as engine:
        yield engine


def engine_threads() -> list[str]:
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name in ("aioengine", "device")]


async def test_what_it_generates_and_what_is_refused() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    async with running() as engine:
        assert (engine.rank, engine.is_leader) == (0, True)
        with pytest.raises(EngineError, match="outside a phase"):
            await engine.generate(ROW["prompt_ids"], GREEDY).collect()
        async with engine.active():
            (answer,) = await engine.generate(ROW["prompt_ids"], GREEDY).collect()
            assert answer.token_ids == ROW["token_ids"]
            assert answer.finish_reason == "length"
            text = ""
            async for update in engine.generate(ROW["prompt"], GREEDY):
                text += update.text
            assert text == answer.text
            two = SamplingParams(n=2, seed=1, max_tokens=4, logprobs=1, logit_bias={"5": -100})
            answers = await engine.generate(ROW["prompt_ids"], two).collect()
            assert [answer.index for answer in answers] == [0, 1]
            assert all(len(answer.logprobs) == 4 for answer in answers)
            with pytest.raises(EngineError, match="in a phase already"):
                async with engine.active():
                    pass
        with pytest.raises(EngineError, match="outside a phase"):
            await engine.generate(ROW["prompt_ids"], GREEDY).collect()
        async with engine.active():  # again
            (answer,) = await engine.generate(ROW["prompt_ids"], GREEDY).collect()
            assert answer.token_ids == ROW["token_ids"]
    assert signal.getsignal(signal.SIGTERM) is handler
    with pytest.raises(EngineError, match="the engine is closed"):
        await engine.collective_rpc(rpc_methods.rank_of)
    assert not engine_threads()


async def test_the_programs_interpreter_is_left_alone() -> None:
    before = gc.isenabled(), gc.get_threshold(), sys.getswitchinterval()
    num_frozen = gc.get_freeze_count()  # by an import of this test session; some may be freed
    async with running() as engine, engine.active():
        await engine.generate("Once", GREEDY).collect()
        assert (gc.isenabled(), gc.get_threshold(), sys.getswitchinterval()) == before
        assert gc.get_freeze_count() <= num_frozen


async def test_use_before_entering_and_entering_twice_are_refused() -> None:
    engine = AsyncEngine(EngineConfig(model=str(STORIES), cpu_threads=1))
    for use in (lambda: engine.rank, lambda: engine.generate([1]), lambda: engine.across_replicas):
        with pytest.raises(EngineError, match="not entered yet"):
            use()
    async with engine:
        with pytest.raises(EngineError, match="entered already"):
            async with engine:
                pass
    async with engine, engine.active():  # again
        (answer,) = await engine.generate(ROW["prompt_ids"], GREEDY).collect()
        assert answer.token_ids == ROW["token_ids"]


async def test_cancellations_around_a_phase_keep_the_engine_usable() -> None:
    async with running() as engine, asyncio.TaskGroup() as tasks:
        phase = engine.active()
        await phase.__aenter__()
        await anext(engine.generate(ROW["prompt_ids"], ENDLESS))
        leaving = tasks.create_task(leave(phase))
        await asyncio.sleep(0)
        leaving.cancel()
        entering = tasks.create_task(enter_and_leave(engine))
        await asyncio.wait([leaving])
        await asyncio.sleep(0)
        time.sleep(0.2)  # noqa: ASYNC251  # the phase begins: in the next turn of this loop
        entering.cancel()
        await asyncio.wait([entering])
        assert leaving.cancelled()
        assert entering.cancelled()
        async with engine.active():
            with pytest.raises(EngineError, match="in a phase already"):
                await engine.active().__aenter__()
            (answer,) = await engine.generate(ROW["prompt_ids"], GREEDY).collect()
            assert answer.token_ids == ROW["token_ids"]


async def leave(phase: AbstractAsyncContextManager[None]) -> None:
    await phase.__aexit__(None, None, None)


async def enter_and_leave(engine: AsyncEngine) -> None:
    async with engine.active():
        pass


async def test_a_beginning_that_was_cut_short_begins_again() -> None:
    async with running() as engine, engine.active():
        stream = engine.generate([1, -1], GREEDY)
        for _ in range(2):
            with pytest.raises(ValueError, match="token id -1"):
                await anext(stream)
        stream = engine.generate(ROW["prompt_ids"], GREEDY)
        async with asyncio.TaskGroup() as tasks:
            beginning = tasks.create_task(stream.collect())
            await asyncio.sleep(0)
            beginning.cancel()
        (answer,) = await stream.collect()
        assert answer.token_ids == ROW["token_ids"]


async def test_a_blocked_reader_is_woken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has not read stays in one place, however long it does not."""
    async with running() as engine, engine.active():
        stream = engine.generate(ROW["prompt_ids"], GREEDY)
        first = await anext(stream)
        loop, wakes = asyncio.get_running_loop(), []
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: wakes.append(args))
        while engine._host.engine.load.num_running:
            time.sleep(0.01)  # noqa: ASYNC251
        assert len(wakes) <= 1
        monkeypatch.undo()
        for wake in wakes:
            loop.call_soon(*wake)
        (rest,) = await stream.collect()
        assert first.token_ids + rest.token_ids == ROW["token_ids"]


async def test_a_stream_stays_in_its_event_loop() -> None:
    async with running() as engine, engine.active():
        stream = engine.generate(ROW["prompt_ids"], GREEDY)
        with ThreadPoolExecutor(1) as other:
            other.submit(asyncio.run, stream.__aenter__()).result()
        with pytest.raises(RuntimeError, match="belongs to the event loop"):
            await anext(stream)


async def test_calls_outlive_the_phase_in_which_they_began() -> None:
    rpc_methods.GATE.clear()
    async with running() as engine, asyncio.TaskGroup() as tasks, engine.active():
        calls = [
            tasks.create_task(caller.collective_rpc(rpc_methods.wait_for_gate, ("it",)))
            for caller in (engine, engine.across_replicas)
        ]
        await engine.reset_prefix_cache()  # behind them
        asyncio.get_running_loop().call_later(0.1, rpc_methods.GATE.set)
    assert [call.result() for call in calls] == [["it of 0"], [["it of 0"]]]


async def test_on_failure_that_exits_hangs_nobody() -> None:
    engine = AsyncEngine(
        EngineConfig(model=str(STORIES), cpu_threads=1), on_failure=lambda error: sys.exit(3)
    )
    async with engine:
        assert engine._host._watch is not None
        engine._thread.tell(partial(engine._host._watch.fail, "made up", 0))
        await engine._thread.wait_gone()
        with pytest.raises(ReplicaFailedError, match="made up"):
            await engine.collective_rpc(rpc_methods.rank_of)


JUNK: list[tuple[Any, SamplingParams, str]] = [
    ([], GREEDY, "prompt must not be empty"),
    ([1, -1], GREEDY, "token id -1"),
    ([1, 10**6], GREEDY, "prompt has token id 1000000"),
    (["a"], GREEDY, "expected text or token ids, got list"),
    (None, GREEDY, "expected text or token ids, got NoneType"),
    ([1], SamplingParams(temperature=float("nan")), "temperature is nan"),
    ([1], SamplingParams(top_p=2.0), "top_p"),
    ([1], SamplingParams(max_tokens=10**6), "max_tokens is 1000000"),
    ([1], SamplingParams(temperature="hot"), "temperature"),  # type: ignore[arg-type]
]


async def test_junk_is_a_value_error_and_the_engine_goes_on() -> None:
    async with running() as engine, engine.active():
        for prompt, params, message in JUNK:
            with pytest.raises(ValueError, match=message):
                await engine.generate(prompt, params).collect()
        (answer,) = await engine.generate(ROW["prompt_ids"], GREEDY).collect()
        assert answer.token_ids == ROW["token_ids"]


async def test_leaving_a_stream_aborts_it() -> None:
    async with running(max_num_seqs=1) as engine, engine.active():
        async with engine.generate(ROW["prompt_ids"], ENDLESS) as stream:
            async for _ in stream:
                break
        (answer,) = await engine.generate(ROW["prompt_ids"], GREEDY).collect()  # has the one slot
        assert answer.token_ids == ROW["token_ids"]
        with pytest.raises(RequestFailedError, match="aborted"):
            await anext(stream)

        async for _ in engine.generate(ROW["prompt_ids"], ENDLESS):
            break  # dropped without a context
        gc.collect()
        (answer,) = await engine.generate(ROW["prompt_ids"], GREEDY).collect()
        assert answer.token_ids == ROW["token_ids"]


async def test_a_cancelled_reader_misses_nothing() -> None:
    async with running() as engine, engine.active():
        token_ids: list[int] = []
        async with engine.generate(ROW["prompt_ids"], GREEDY) as stream:
            while len(token_ids) < len(ROW["token_ids"]):
                try:
                    async with asyncio.timeout(0.0005):
                        token_ids += (await anext(stream)).token_ids
                except TimeoutError:
                    continue
        assert token_ids == ROW["token_ids"]


async def test_the_end_of_a_phase_ends_its_requests() -> None:
    async with running() as engine:
        async with engine.active():
            stream = engine.generate(ROW["prompt_ids"], ENDLESS)
            await anext(stream)
        with pytest.raises(RequestFailedError, match="has left active"):
            await stream.collect()
        async with engine.active():
            (answer,) = await engine.generate(ROW["prompt_ids"], GREEDY).collect()
            assert answer.token_ids == ROW["token_ids"]


async def test_calls() -> None:
    async with running() as engine:
        assert await engine.collective_rpc(rpc_methods.rank_of) == [0]  # outside a phase, too
        assert await engine.collective_rpc(rpc_methods.rank_of, unique_reply_rank=0) == 0
        assert await engine.across_replicas.collective_rpc(rpc_methods.rank_of) == [[0]]
        with pytest.raises(TypeError, match="lambda"):
            await engine.collective_rpc(lambda worker: 1)
        with pytest.raises(ValueError, match="unique_reply_rank 1"):
            await engine.across_replicas.collective_rpc("rank_info", unique_reply_rank=1)
        for calls in (engine, engine.across_replicas):
            with pytest.raises(WorkerError, match="rank 0 was told to fail") as caught:
                await calls.collective_rpc(rpc_methods.fail_on, (0,))
            assert caught.value.type_name == "KeyError"
            assert "raise KeyError" in caught.value.traceback
            assert "support.rpc_methods:fail_on" in caught.value.where
        await engine.reset_prefix_cache()
        await engine.across_replicas.reset_prefix_cache()


async def test_a_failed_start_says_why() -> None:
    with pytest.raises(ValueError, match="max_num_seqs"):
        AsyncEngine(EngineConfig(max_num_seqs=0))
    with pytest.raises(ValueError, match=r"got `PosixPath` - at `\$.model`"):
        AsyncEngine(EngineConfig(model=Path("/a")))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="--model: '/nowhere'"):
        async with AsyncEngine(EngineConfig(model="/nowhere")):
            pass
    with pytest.raises(ValueError, match="tp 2"):
        async with AsyncEngine(EngineConfig(model=str(STORIES), tensor_parallel_size=2)):
            pass
    with pytest.raises(StartupError, match="--max-model-len 500 needs"):
        async with running(max_model_len=500, kv_cache_memory_bytes=2**18):
            pass
    assert not engine_threads()


async def test_the_programs_own_error_comes_out() -> None:
    failures: list[EngineError] = []
    engine = AsyncEngine(EngineConfig(model=str(STORIES)), on_failure=failures.append)
    with pytest.raises(ZeroDivisionError):
        async with engine, engine.active():
            raise ZeroDivisionError
    assert not failures
