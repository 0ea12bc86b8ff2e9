"""The front end's record of what clients wait for: one Choice per completion, grouped in a
Generation. Deltas that a client has not read yet merge, so a slow reader holds text, not events."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from aioengine.errors import RequestFailedError
from aioengine.frontend.detokenizer import IncrementalDetokenizer
from aioengine.frontend.metrics import Metrics
from aioengine.messages import ChoiceParams, FinishReason, RequestDelta, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceSpec:
    """One completion that a client asks for."""

    prompt_ids: tuple[int, ...]
    params: ChoiceParams
    detokenizer: IncrementalDetokenizer
    asked_tokens: int | None = None
    """The client's own max_tokens; without, nobody knows how long the answer will be."""
    eos_token_ids: tuple[int, ...] = ()
    """Stop tokens that are no `stop_reason`."""
    include_stop: bool = False
    priority: int = 0
    cache_salt: str = ""


@dataclass(slots=True)
class Update:
    """What is new in one choice since the client last looked."""

    index: int
    pieces: list[str] = field(default_factory=list)
    """Of the text: joined once, so that a long answer costs what it is long."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string, or the id of the stop token when it is not an end-of-sequence token."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def extend(self, later: "Update") -> None:
        """By the next update of the same choice."""
        self.pieces += later.pieces
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


class Choice:
    """One completion under way. Fed by its replica's deltas, read by its Generation."""

    def __init__(self, request_id: str, index: int, spec: ChoiceSpec, metrics: Metrics) -> None:
        self.request_id = request_id
        self.index = index
        self.spec = spec
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Of the prompt's tokens from the second on; complete before the first output token."""
        self.is_finished = False
        self.error: str | None = None
        self._metrics = metrics
        self._arrived = time.monotonic()
        self._last_token = self._arrived
        self._unread = Update(index)
        self._has_news = False

    def push(self, delta: RequestDelta) -> bool:
        """Take a delta; True when a stop string ended the choice and the leader must be told."""
        if self.is_finished:
            return False
        if delta.num_cached_tokens:
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.finish_reason == "error":
            self.fail(delta.error)
            return False
        self.prompt_logprobs += delta.prompt_logprobs
        self._has_news = True
        self._observe(len(delta.token_ids))
        detokenizer, unread = self.spec.detokenizer, self._unread
        ends_with_stop_token = delta.finish_reason == "stop" and not self.spec.include_stop
        shown = delta.token_ids[:-1] if ends_with_stop_token else delta.token_ids
        unread.pieces.append(detokenizer.push(shown))
        num_counted = len(delta.token_ids)
        if detokenizer.stopped is not None:
            num_counted = detokenizer.num_counted
            unread.finish_reason, unread.stop_reason = "stop", detokenizer.stopped
        elif delta.finish_reason is not None:
            unread.pieces.append(detokenizer.finish())
            unread.finish_reason = delta.finish_reason
            if delta.finish_reason == "stop" and delta.token_ids[-1] not in self.spec.eos_token_ids:
                unread.stop_reason = delta.token_ids[-1]
        unread.token_ids += delta.token_ids[:num_counted]
        unread.logprobs += delta.logprobs[:num_counted]
        self.num_output_tokens += num_counted
        if unread.finish_reason is not None:
            self._end(unread.finish_reason)
        return self.is_finished and delta.finish_reason is None

    def fail(self, error: str) -> None:
        """The engine could not go on with this choice."""
        self.error = error
        self._end("error")

    def cancel(self) -> None:
        """The client has left."""
        self._end("abort")

    def take(self) -> Update | None:
        """The merged news, once."""
        if not self._has_news:
            return None
        update, self._unread = self._unread, Update(self.index)
        self._has_news = False
        return update

    def _end(self, reason: FinishReason) -> None:
        if not self.is_finished:
            self.is_finished = True
            self._metrics.finished(reason, time.monotonic() - self._arrived)

    def _observe(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        now = time.monotonic()
        if self.num_output_tokens == 0:
            self._metrics.first_token(now - self._arrived)
        else:
            self._metrics.next_tokens(num_tokens, now - self._last_token)
        self._last_token = now
        self._metrics.generated(num_tokens)


class Generation:
    """All choices of one HTTP request: an async iterator of Updates, and a context that aborts
    what is unfinished when it is left.

    Raises RequestFailedError from iteration when a choice failed.
    """

    def __init__(self, choices: list[Choice], on_close: Callable[["Generation"], None]) -> None:
        self.choices = choices
        self._on_close = on_close
        self._news = asyncio.Event()

    async def __aenter__(self) -> "Generation":
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._on_close(self)

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> list[Update]:
        """Everything new since the last call, at most one Update per choice."""
        while True:
            updates = [update for choice in self.choices if (update := choice.take()) is not None]
            if updates:
                return updates
            failed = next((choice.error for choice in self.choices if choice.error), None)
            if failed is not None:
                raise RequestFailedError(failed)
            if all(choice.is_finished for choice in self.choices):
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()

    def wake(self) -> None:
        """A choice has news."""
        self._news.set()
