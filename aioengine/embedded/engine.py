"""AsyncEngine: an engine inside the ranks of a program that torchrun or srun started, a trainer.

Every rank of the launch enters the engine. It runs in threads of its own; the program talks to it
from its own event loop, and may block that whenever it likes.
"""

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import msgspec

from aioengine.config import EngineConfig
from aioengine.control.deadline import Deadline
from aioengine.control.walltime import NO_END
from aioengine.embedded.host import EngineHost, OnFailure
from aioengine.embedded.loop_thread import LoopEndedError, LoopThread
from aioengine.embedded.requests import Requests
from aioengine.embedded.stream import GenerationStream
from aioengine.engine.leader import Leader
from aioengine.errors import EngineError
from aioengine.frontend.sampling import SamplingParams
from aioengine.layout import Coords
from aioengine.messages import ResetPrefixCache
from aioengine.rank.place import Place
from aioengine.rank.recording import StepRecorder

P = ParamSpec("P")
T = TypeVar("T")


class AsyncEngine:
    """`async with AsyncEngine(EngineConfig(...)) as engine:` on every rank of the launch.

    A rank's place comes from the launcher's variables, as for `python -m aioengine.launch`.
    torch.distributed is used where the program has initialised it, and left alive. Settings that
    concern HTTP, signals and logging have no meaning here; nobody's process is killed.

    Failures are raised by calls: RankLostError from those in flight when a rank is lost,
    ReplicaFailedError from all later ones. `on_failure` hears of the first failure, once, at once
    and in the engine's thread, also while the program's own thread is blocked; it must not block.

    Entering raises ValueError or StartupError. A rank that leaves by an exception fails its
    replica, so that nobody waits for it.
    """

    def __init__(self, config: EngineConfig, *, on_failure: OnFailure | None = None) -> None:
        """Raises ValueError that names the setting which is out of bounds."""
        try:
            checked = msgspec.convert(msgspec.structs.asdict(config), EngineConfig)
        except msgspec.ValidationError as error:
            raise ValueError(f"EngineConfig: {error}") from None
        # Every leader has a front end, for its own program; and the processes are not ours to end.
        self._config = msgspec.structs.replace(checked, api_ranks="leaders", kill_frozen=False)
        self._on_failure = on_failure
        self._is_in_phase = False
        self._entered: _Entered | None = None

    async def __aenter__(self) -> Self:
        if self._entered is not None and not self._entered.thread.is_gone:
            raise EngineError("this engine is entered already")
        place = Place.find(self._config, os.environ)
        startup = Deadline(self._config.startup_timeout_seconds)  # the program may be old
        # When to stop before the end of a job is the trainer's decision.
        place = dataclasses.replace(place, startup=startup, walltime=NO_END)
        host = EngineHost(place, self._on_failure)
        thread = LoopThread(host.live, "aioengine")
        self._entered = _Entered(place, host, thread)
        thread.start()
        try:
            await self._call(host.wait_ready)
        except (EngineError, ValueError):
            await thread.wait_gone()
            raise
        except BaseException:  # the caller's own: the other ranks see this one's connections close
            thread.cancel()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Returns when the engine has ended: on a leader at once, on peers with their leader."""
        reason = None if exc is None else f"its program has left the engine: {exc!r:.200}"
        self._thread.tell(partial(self._host.leave, reason))
        await self._thread.wait_gone()

    # --- where this rank stands

    @property
    def rank(self) -> int:
        return self._place.rank

    @property
    def coords(self) -> Coords:
        return self._place.layout.coords(self.rank)

    @property
    def is_leader(self) -> bool:
        """Whether `generate` and `collective_rpc` may be called here."""
        return self._place.is_leader

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output, in tokens. Leaders only."""
        return self._requests("max_model_len").max_model_len

    @property
    def step_recorder(self) -> StepRecorder:
        """Records this rank's own part of the steps. For measurements."""
        return self._host.recorder

    # --- phases

    @asynccontextmanager
    async def active(self, timeout: float | None = None) -> AsyncIterator[None]:  # noqa: ASYNC109
        """A phase in which the engine may compute. Every rank of the replica enters it.

        The body begins when all have entered (seconds in `timeout`, None: no limit; the log says
        now and then who is missing). The leader's end of the body aborts what still runs; a peer
        stays until the leader has left, unless its body raises. Outside of phases the engine runs
        no collective, and only closed connections count as loss. Raises PhaseTimeoutError that
        names who is missing.
        """
        if self._is_in_phase:
            raise EngineError("active(): this rank is in a phase already")
        self._is_in_phase = True
        try:
            await self._enter_phase(timeout)
            try:
                yield
            except BaseException:
                await self._leave_phase_by_error()
                raise
            await self._call(self._host.leave_phase)
        finally:
            self._is_in_phase = False

    async def _enter_phase(self, timeout_s: float | None) -> None:
        try:
            await self._call(self._host.enter_phase, timeout_s)
        except asyncio.CancelledError:
            if self.is_leader:  # the phase may have begun at the same moment
                self._thread.tell(self._host.begin_leaving_phase)
            raise

    async def _leave_phase_by_error(self) -> None:
        """A peer does not wait for its leader, which may wait for this program."""
        if not self.is_leader:
            self._thread.tell(self._host.begin_leaving_phase)
            return
        with contextlib.suppress(EngineError):  # the body's own error says more
            await self._call(self._host.leave_phase)

    # --- on leaders

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> GenerationStream:
        """The model's answer to a text or to token ids, as it comes, from this rank's replica."""
        requests = self._requests("generate")
        return GenerationStream(
            lambda sink: self._call(requests.begin, prompt, params, sink),
            lambda sink: self._thread.tell(partial(requests.abort, sink)),
        )

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
        unique_reply_rank: int | None = None,
    ) -> Any:
        """Call a method on every rank of this replica; values in rank order, or the one asked for.

        `method` is a registered name or a function of a module that every rank can import; it gets
        the rank's worker first and runs on its device thread, between two steps. Outside of phases
        it must not use collectives that the program may be using. Raises WorkerError when it
        raised on any rank, RpcTimeoutError after `timeout` seconds, TypeError for what cannot
        travel, ValueError for a rank that is none.
        """
        self._requests("collective_rpc")
        leader = self._host.engine
        assert isinstance(leader, Leader)
        return await self._call(
            leader.collective_rpc,
            method,
            args,
            kwargs,
            timeout_s=timeout,
            unique_reply_rank=unique_reply_rank,
        )

    async def reset_prefix_cache(self) -> None:
        """Later requests of this replica reuse nothing that was computed before. For programs that
        have changed the weights."""
        requests = self._requests("reset_prefix_cache")
        await self._call(requests.call_this_replica, ResetPrefixCache)

    @property
    def across_replicas(self) -> "AcrossReplicas":
        """The same calls, for all replicas of the launch."""
        return AcrossReplicas(self._requests("across_replicas"), self._call)

    # --- internals

    @property
    def _running(self) -> "_Entered":
        if self._entered is None:
            raise EngineError("this engine is not entered yet: `async with engine:`")
        return self._entered

    @property
    def _place(self) -> Place:
        return self._running.place

    @property
    def _host(self) -> EngineHost:
        return self._running.host

    @property
    def _thread(self) -> LoopThread:
        return self._running.thread

    def _requests(self, what: str) -> Requests:
        if self._host.requests is None:
            raise EngineError(
                f"{what}: {self._place.info} follows; call it on its leader, rank "
                f"{self._place.leader_rank}"
            )
        return self._host.requests

    async def _call(
        self, function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        try:
            return await self._thread.call(function, *args, **kwargs)
        except LoopEndedError:
            assert self._host.end_error is not None
            raise self._host.end_error from None


@dataclass(frozen=True, slots=True)
class _Entered:
    """What an engine has once it was entered; it stays when the engine was left."""

    place: Place
    host: EngineHost
    thread: LoopThread


class AcrossReplicas:
    """Calls that every leader of the launch answers. From any leader's program."""

    def __init__(self, requests: Requests, call: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._requests = requests
        self._call = call

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
        unique_reply_rank: int | None = None,
    ) -> list[Any]:
        """As `AsyncEngine.collective_rpc`; what each replica gives, in DP order.

        `unique_reply_rank` is a rank in every replica. Raises the error of the first replica that
        has one; nobody is asked when a replica has failed before.
        """
        values: list[Any] = await self._call(
            self._requests.collective_rpc_across, method, args, kwargs, timeout, unique_reply_rank
        )
        return values

    async def reset_prefix_cache(self) -> None:
        await self._call(self._requests.call_replicas, ResetPrefixCache)
