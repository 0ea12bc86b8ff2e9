"""The front end's record of what clients wait for: one Choice per completion, grouped in a
Generation. Deltas that a client has not read yet merge, so a slow reader holds text, not events.

A step may bring a token for each of hundreds of choices. So a delta costs no task, no future and,
unless stop strings are looked for, no text: that is made when somebody reads it.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Protocol

import msgspec

from aioengine.errors import RequestFailedError
from aioengine.frontend.detokenizer import IncrementalDetokenizer
from aioengine.frontend.metrics import Metrics
from aioengine.messages import ChoiceParams, FinishReason, RequestDelta, TokenLogprobs

MAX_IDS_WITHOUT_TEXT: Final = 512
"""Of a choice that nobody reads before its end: the text of more is made as they come, so that no
moment of the loop is long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceSpec:
    """One completion that a client asks for."""

    prompt_ids: tuple[int, ...]
    params: ChoiceParams
    detokenizer: IncrementalDetokenizer
    asked_tokens: int | None = None
    """The client's own max_tokens; without, nobody knows how long the answer will be. 0: only the
    prompt is of interest, what is drawn after it is left out."""
    eos_token_ids: tuple[int, ...] = ()
    """Stop tokens that are no `stop_reason`."""
    include_stop: bool = False
    priority: int = 0
    cache_salt: str = ""
    echo: str = ""
    """What the text begins with: that of the prompt, if anything."""


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
        self.first_token_s: float | None = None
        """Since the request came."""
        self.is_finished = False
        self.error: str | None = None
        self._metrics = metrics
        self._arrived = time.monotonic()
        self._admitted = self._arrived
        self._last_token = self._arrived
        self._unread = Update(index, [spec.echo] if spec.echo else [])
        self._num_with_text = 0
        """Of the unread ids, from the first on."""
        self._has_news = False

    def admit(self, now: float) -> None:
        """It has waited for its first slot until `now`."""
        self._admitted = now
        self._metrics.admitted(now - self._arrived)

    def push(self, delta: RequestDelta, now: float) -> bool:
        """Take a delta that came at `now` (monotonic); True when a stop string ended the choice and
        the leader must be told."""
        if self.is_finished:
            return False
        if delta.num_cached_tokens:
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.finish_reason == "error":
            self.fail(delta.error)
            return False
        if delta.prompt_logprobs:
            self.prompt_logprobs += delta.prompt_logprobs
        if self.spec.asked_tokens == 0:
            delta = _without_output(delta)
        if not delta.token_ids and delta.finish_reason is None:
            return False
        self._has_news = True
        if delta.finish_reason is not None or self.spec.detokenizer.has_stop_strings:
            self._push_text(delta, now)
            return self.is_finished and delta.finish_reason is None
        num_tokens = len(delta.token_ids)
        self._observe(num_tokens, now)
        unread = self._unread
        unread.token_ids += delta.token_ids
        if delta.logprobs:
            unread.logprobs += delta.logprobs
        self.num_output_tokens += num_tokens
        if len(unread.token_ids) - self._num_with_text > MAX_IDS_WITHOUT_TEXT:
            self._make_text()
        return False

    def _push_text(self, delta: RequestDelta, now: float) -> None:
        """Take a delta whose text decides what it means, or that is the last."""
        self._make_text()
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
        self._num_with_text = len(unread.token_ids)
        if num_counted:
            self._observe(num_counted, now)
        self.num_output_tokens += num_counted
        if unread.finish_reason is not None:
            self._end(unread.finish_reason)

    def _make_text(self) -> None:
        """Of the unread ids that have none yet."""
        unread = self._unread
        if len(unread.token_ids) > self._num_with_text:
            token_ids = unread.token_ids[self._num_with_text :]
            unread.pieces.append(self.spec.detokenizer.push(token_ids))
            self._num_with_text = len(unread.token_ids)

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
        self._make_text()
        update, self._unread = self._unread, Update(self.index)
        self._num_with_text = 0
        self._has_news = False
        return update

    def _end(self, reason: FinishReason) -> None:
        if not self.is_finished:
            self.is_finished = True
            after_s = time.monotonic() - self._arrived
            decode_s = self._last_token - self._arrived - (self.first_token_s or 0.0)
            self._metrics.finished(reason, after_s, self.num_output_tokens, decode_s)

    def _observe(self, num_tokens: int, now: float) -> None:
        if self.num_output_tokens == 0:
            self.first_token_s = now - self._arrived
            prefill_s = now - self._admitted
            self._metrics.first_tokens(num_tokens, self.first_token_s, prefill_s)
        else:
            self._metrics.next_tokens(num_tokens, now - self._last_token)
        self._last_token = now


def _without_output(delta: RequestDelta) -> RequestDelta:
    return msgspec.structs.replace(
        delta, token_ids=(), logprobs=(), finish_reason=delta.finish_reason and "length"
    )


class Sink(Protocol):
    """Where the updates of a Generation go."""

    def write(self, updates: list[Update]) -> bool:
        """Send them without waiting; False when the reader is behind and should get no more."""

    async def drain(self) -> None:
        """Return once a reader that was behind has caught up."""


class Generation:
    """All choices of one request, and a context that aborts what is unfinished when it is left.

    One reader reads it in one of three ways: by iteration, by `feed`, or by `wait_end`. Each raises
    RequestFailedError when a choice failed.
    """

    def __init__(self, choices: list[Choice], on_close: Callable[["Generation"], None]) -> None:
        self.choices = choices
        self._on_close = on_close
        self._news = asyncio.Event()
        self._sink: Sink | None = None
        """Gets what comes, where it comes."""
        self._sink_error: Exception | None = None
        self._awaits_end = False

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
            if updates := self._take():
                return updates
            self._raise_if_failed()
            if self._is_over():
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()

    async def feed(self, sink: Sink) -> None:
        """Write updates to `sink` until the end.

        While its reader keeps up, what a step brought is written in the callback that received it:
        no task wakes up for a token. What comes while the reader is behind merges.
        """
        while True:
            if not sink.write(self._take()):
                await sink.drain()
                continue
            if self._is_over():
                break
            self._news.clear()
            self._sink = sink
            try:
                await self._news.wait()
            finally:
                self._sink = None
            if self._sink_error is not None:
                raise self._sink_error
        self._raise_if_failed()

    async def wait_end(self) -> list[Update]:
        """Wait until all choices have ended; everything that is new then."""
        self._awaits_end = True
        try:
            while not self._is_over():
                self._news.clear()
                await self._news.wait()
        finally:
            self._awaits_end = False
        self._raise_if_failed()
        return self._take()

    def wake(self) -> None:
        """Choices have news."""
        if self._sink is not None and not self._is_over():
            try:
                if self._sink.write(self._take()):
                    return
            except Exception as error:  # this is the reader's business, not the leader's link's
                self._sink_error = error
            self._sink = None
        elif self._awaits_end and not self._is_over():
            return
        self._news.set()

    def _take(self) -> list[Update]:
        return [update for choice in self.choices if (update := choice.take()) is not None]

    def _is_over(self) -> bool:
        """All choices have ended, or one failed."""
        is_finished = True
        for choice in self.choices:
            if choice.error:
                return True
            is_finished &= choice.is_finished
        return is_finished

    def _raise_if_failed(self) -> None:
        for choice in self.choices:
            if choice.error:
                raise RequestFailedError(choice.error)
