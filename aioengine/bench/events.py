"""What an answer of an OpenAI-compatible server says: when tokens came, how many, or what failed.

Pure. Events are counted as lines that begin with `data:`, which JSON cannot contain; only those at
the beginning (is it a token yet?) and at the end (usage, errors) are decoded.
"""

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from aioengine.bench.client import Answer

EVENT: Final = re.compile(rb"(?:^|\n)data:")
DONE: Final = b"[DONE]"
MAX_LAST_EVENTS: Final = 4
"""Behind the last token: finish reason, usage, [DONE], and one to spare."""
MAX_ERROR_CHARS: Final = 200


@dataclass(frozen=True, slots=True)
class Record:
    """One request, over. Times are `time.perf_counter()`."""

    num_asked_tokens: int
    sent_s: float
    end_s: float
    """Of a stream: when its last token came."""
    token_s: Sequence[float] = ()
    """When each event with tokens came; of an answer in one piece nothing."""
    num_prompt_tokens: int | None = None
    """None where the server does not say."""
    num_output_tokens: int = 0
    is_exact: bool = True
    """Whether the server said how many tokens there were; otherwise events were counted."""
    failure: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.token_s[0] - self.sent_s if self.token_s else None

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: gaps between events with tokens, as a reader sees them."""
        return [
            later - earlier for earlier, later in zip(self.token_s, self.token_s[1:], strict=False)
        ]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first."""
        if len(self.token_s) < 2 or self.num_output_tokens < 2:
            return None
        return (self.token_s[-1] - self.token_s[0]) / (self.num_output_tokens - 1)


def failed(num_asked_tokens: int, sent_s: float, end_s: float, failure: str) -> Record:
    return Record(num_asked_tokens, sent_s, end_s, failure=failure)


def read_answer(answer: Answer, num_asked_tokens: int) -> Record:
    """The record of an answer, whole or broken."""
    if answer.status == 200 and answer.is_event_stream:
        return _read_stream(answer, num_asked_tokens)
    failure = _failure_of_whole(answer)
    if failure:
        return failed(num_asked_tokens, answer.sent_s, answer.end_s, failure)
    usage = _object(answer.body).get("usage") or {}
    return Record(
        num_asked_tokens,
        answer.sent_s,
        answer.end_s,
        num_prompt_tokens=usage.get("prompt_tokens"),
        num_output_tokens=usage.get("completion_tokens", 0),
        is_exact="completion_tokens" in usage,
    )


def _failure_of_whole(answer: Answer) -> str:
    if not answer.status:
        return answer.broken
    if answer.status != 200:
        return f"HTTP {answer.status}: {error_text(answer.body)}"
    if answer.broken:
        return f"{answer.broken} in the middle of the answer"
    if "choices" not in _object(answer.body):
        return f"no completion: {error_text(answer.body)}"
    return ""


def _read_stream(answer: Answer, num_asked_tokens: int) -> Record:
    body = answer.body
    ends = [match.end() for match in EVENT.finditer(body)]
    first, last = 0, len(ends)
    while first < last and not _has_token(_event(body, ends, first)):
        first += 1
    usage: dict[str, Any] = {}
    finish: int | None = None
    is_done, failure = False, ""
    for index in range(last - 1, max(0, last - MAX_LAST_EVENTS) - 1, -1):
        event = _event(body, ends, index)
        if event is None:
            is_done = True
        elif "error" in event:
            failure = f"error event: {_message(event)}"
        else:
            usage = usage or event.get("usage") or {}
            if any(choice.get("finish_reason") for choice in _choices(event)):
                finish = index
        if first < last == index + 1 and not _has_token(event):
            last = index
    num_tokens: int | None = usage.get("completion_tokens")
    with_tokens = ends[first:last]
    if finish is not None and not first <= finish < last and len(with_tokens) < (num_tokens or 0):
        with_tokens.append(ends[finish])  # the last token had no text
    token_s = [answer.read_s[bisect.bisect_left(answer.lengths, end)] for end in with_tokens]
    if not failure and not is_done and finish is None:
        failure = f"{answer.broken or 'the stream ended early'}, after {len(token_s)} events"
    if not failure and not token_s:
        failure = "a stream without tokens"
    return Record(
        num_asked_tokens,
        answer.sent_s,
        token_s[-1] if token_s else answer.end_s,
        token_s=token_s,
        num_prompt_tokens=usage.get("prompt_tokens"),
        num_output_tokens=len(token_s) if num_tokens is None else num_tokens,
        is_exact=num_tokens is not None,
        failure=failure,
    )


def _event(body: bytearray, ends: Sequence[int], index: int) -> dict[str, Any] | None:
    """Its JSON object; None for [DONE]. What is broken off is an empty object."""
    stop = ends[index + 1] if index + 1 < len(ends) else len(body)
    data = body[ends[index] : stop].partition(b"\n")[0].strip()
    return None if data == DONE else _object(data)


def _has_token(event: dict[str, Any] | None) -> bool:
    """A chat begins with an event that only has a role; some servers end with one that only has a
    finish reason. Both have no text; a token may have none, either."""
    if event is None:
        return False
    for choice in _choices(event):
        delta = choice.get("delta") or {}
        has_text = any(isinstance(v, str) and v for k, v in delta.items() if k != "role")
        if choice.get("text") or has_text or delta.get("tool_calls"):
            return True
        if not choice.get("finish_reason") and "role" not in delta:
            return True
    return False


def _choices(event: dict[str, Any]) -> list[dict[str, Any]]:
    return [choice for choice in event.get("choices") or [] if isinstance(choice, dict)]


def _object(data: bytes | bytearray) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def error_text(body: bytes | bytearray) -> str:
    """What an error answer says, in one line."""
    message = _message(_object(body))
    text = message or body.decode(errors="replace")
    return " ".join(text.split())[:MAX_ERROR_CHARS] or "no text"


def _message(answer: dict[str, Any]) -> str:
    error = answer.get("error")
    if isinstance(error, dict):
        error = error.get("message")
    text = error or answer.get("message") or answer.get("detail") or ""
    return " ".join(str(text).split())[:MAX_ERROR_CHARS]
