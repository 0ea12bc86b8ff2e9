"""What a leader inside a trainer's rank does for its program: requests and calls. Engine's thread.

Requests go to the replica of this rank; calls may go to all.
"""

import asyncio
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from aioengine.control.watch import Watch
from aioengine.embedded.stream import Sink
from aioengine.engine.leader import Leader
from aioengine.errors import EngineError, ReplicaFailedError, RequestFailedError
from aioengine.frontend.choices import check_text, resolve_choices
from aioengine.frontend.front_end import FrontEnd, Replica, UnavailableError
from aioengine.frontend.records import Generation
from aioengine.frontend.replica_calls import MakeCommand
from aioengine.frontend.sampling import InvalidFieldError, SamplingParams
from aioengine.frontend.text import ServedModel, TextPool
from aioengine.messages import ReplicaCall


class Requests:
    """Owns the tasks that hand a request's updates to its reader."""

    def __init__(
        self,
        leader: Leader,
        front_end: FrontEnd,
        dp_rank: int,
        watch: Watch,
        model: ServedModel,
        text: TextPool,
        tasks: asyncio.TaskGroup,
        seed: int,
    ) -> None:
        self._leader = leader
        self._front_end = front_end
        self._dp_rank = dp_rank
        self._watch = watch
        self._model = model
        self._text = text
        self._tasks = tasks
        self._seeds = random.Random(seed)
        self._running: dict[Sink, asyncio.Task[None]] = {}

    @property
    def max_model_len(self) -> int:
        ready = self._replica.ready
        assert ready is not None
        return ready.max_model_len

    @property
    def _replica(self) -> Replica:
        return self._front_end.replicas[self._dp_rank]

    async def begin(
        self, prompt: str | Sequence[int], params: SamplingParams | None, sink: Sink
    ) -> None:
        """Start a request whose updates go to `sink`. Raises InvalidFieldError, and EngineError
        outside a phase or when no more requests are taken."""
        self._check_phase()
        fields = (params or SamplingParams()).checked()
        prompt_ids = await self._encode(prompt)
        self._check_phase()
        specs = resolve_choices(
            self._model,
            fields,
            [prompt_ids],
            max_model_len=self.max_model_len,
            seeds=self._seeds,
            prompt_field="prompt",
            max_tokens=fields.max_tokens,
            logprobs=fields.logprobs,
        )
        try:
            generation = self._front_end.generate(specs, self._dp_rank)
        except UnavailableError as error:
            raise EngineError(str(error)) from None
        task = self._tasks.create_task(self._hand_over(generation, sink), name="request")
        self._running[sink] = task
        task.add_done_callback(lambda _: self._running.pop(sink))

    def abort(self, sink: Sink) -> None:
        """Its reader has left."""
        if (task := self._running.get(sink)) is not None:
            task.cancel()

    def end_streams(self, cause: str) -> None:
        """End every request with an error. Calls go on."""
        self._front_end.end_streams(cause)

    def end_all(self, cause: str) -> None:
        """End every request and every call with an error."""
        self._front_end.end_streams(cause)
        self._front_end.end_calls(cause)

    async def call_replicas(self, make_command: MakeCommand) -> list[Any]:
        """What every leader answers, in DP order."""
        return await self._front_end.call_replicas(make_command)

    async def call_this_replica(self, make_command: MakeCommand) -> Any:
        self._check_alive()
        return await self._replica.calls.call(make_command)

    async def collective_rpc_across(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        timeout_s: float | None,
        unique_reply_rank: int | None,
    ) -> list[Any]:
        """As `Leader.collective_rpc`, on every replica; one value or list per replica."""
        call = self._leader.prepare_call(method, args, kwargs or {}, unique_reply_rank)
        return await self.call_replicas(partial(ReplicaCall, call=call, timeout_s=timeout_s))

    # --- internals

    def _check_phase(self) -> None:
        self._check_alive()
        if not self._leader.phases.is_open:
            raise EngineError(
                "generate() outside a phase: it belongs inside `async with engine.active():`, "
                "which every rank of the replica enters"
            )

    def _check_alive(self) -> None:
        if self._watch.failed.done():
            raise ReplicaFailedError(self._watch.failed.result().cause)

    async def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            check_text(self._model, prompt, "prompt", self.max_model_len)
            encode = self._model.tokenizer.encode
            return await self._text.run(encode, prompt, add_special_tokens=True)
        try:
            token_ids = [operator.index(token_id) for token_id in prompt]
        except TypeError:
            raise InvalidFieldError(
                f"prompt: expected text or token ids, got {type(prompt).__name__} {prompt!r:.60}",
                "prompt",
            ) from None
        if token_ids and min(token_ids) < 0:
            raise InvalidFieldError(f"prompt has token id {min(token_ids)}", "prompt")
        return token_ids

    async def _hand_over(self, generation: Generation, sink: Sink) -> None:
        """Until the end; the request is aborted when this is cancelled."""
        error: Exception | None = RequestFailedError("the request was aborted")
        try:
            async with generation:
                async for updates in generation:
                    sink.push(updates)
            error = None
        except RequestFailedError as failed:
            error = failed
            if self._watch.failed.done():
                error = self._watch.failed.result().error
        finally:
            sink.end(error)
