"""Token ids to text as they come, with stop strings.

Works on bytes: every token stands for fixed bytes, so text is their UTF-8 decoding. Each token and
each character is looked at once. A token that is whole characters, between others, is its own text:
nothing is decoded for it.
"""

import codecs
import functools
from collections.abc import Sequence

from aioengine.frontend.tokenizer import Tokenizer
from aioengine.limits import MAX_STOP_STRINGS


class IncrementalDetokenizer:
    """The text of one choice. Owned and fed by one caller.

    Everything pushed and finished, joined, is the decoding of all tokens as the continuation of a
    text: a SentencePiece answer keeps the space before its first word. Characters whose bytes are
    split over tokens come whole; bytes that are not UTF-8 come as U+FFFD, those of an unfinished
    last character only from `finish`.

    Stop strings are found as if characters came one at a time: the first to be complete ends the
    text, the longest when several end at the same character. What the first `min_tokens` tokens
    complete does not count.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self.stopped: str | None = None
        """The stop string that ended the text."""
        self.num_counted = 0
        """How many tokens of the latest push belong to the answer: all, or up to the one that
        completed a stop string."""
        self._tokenizer = tokenizer
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._num_unstoppable = min_tokens
        """Of the tokens to come."""
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_within_character = False
        """The decoder holds its first bytes."""
        self._matchers = [_StopMatcher(pattern) for pattern in stop]
        self._held = ""
        """The longest end of the text that may be the beginning of a stop string."""

    @property
    def has_stop_strings(self) -> bool:
        return bool(self._matchers)

    def push(self, token_ids: Sequence[int]) -> str:
        """The new text that is ready to be sent. Empty once a stop string was found."""
        if self._matchers:
            return self._push_stoppable(token_ids)
        self.num_counted = len(token_ids)
        return "".join([self._text_of(token_id) for token_id in token_ids])

    def _push_stoppable(self, token_ids: Sequence[int]) -> str:
        ready: list[str] = []
        self.num_counted = 0
        for token_id in token_ids:
            if self.stopped is not None:
                break
            self.num_counted += 1
            self._num_unstoppable -= 1
            if text := self._text_of(token_id):
                ready.append(self._advance(text))
        return "".join(ready)

    def _text_of(self, token_id: int) -> str:
        """What a token adds to the text before it; all or a part of it may come with the next."""
        if self._skip_special_tokens and token_id in self._tokenizer.special_ids:
            return ""
        if not self._is_within_character:
            text = self._tokenizer.whole_texts[token_id]
            if text is not None:
                return text
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._is_within_character = bool(self._utf8.getstate()[0])
        return text

    def finish(self) -> str:
        """The answer ends here: what was held back. Empty after a stop string."""
        if self.stopped is not None:
            return ""
        ready = self._utf8.decode(b"", final=True)
        if not self._matchers:
            return ready
        ready = self._advance(ready)
        held, self._held = self._held, ""
        return ready + held

    def _advance(self, new: str) -> str:
        text = self._held + new
        for end, char in enumerate(new, start=len(self._held) + 1):
            complete = [matcher.pattern for matcher in self._matchers if matcher.advance(char)]
            if complete and self._num_unstoppable < 0:
                self.stopped = max(complete, key=len)
                self._held = ""
                return text[: end if self._include_stop else end - len(self.stopped)]
        num_held = max(matcher.num_matched for matcher in self._matchers)
        ready = text[: len(text) - num_held]
        self._held = text[len(ready) :]
        return ready


class _StopMatcher:
    """Knuth-Morris-Pratt search for one non-empty string in characters that come one by one."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.num_matched = 0
        """Length of the longest beginning of the pattern, but not all of it, that the text so far
        ends with."""
        self._borders = _borders(pattern)

    def advance(self, char: str) -> bool:
        """True when the pattern ends here."""
        self.num_matched = _step(self.pattern, self._borders, self.num_matched, char)
        if self.num_matched < len(self.pattern):
            return False
        self.num_matched = self._borders[-1]
        return True


def _step(pattern: str, borders: Sequence[int], matched: int, char: str) -> int:
    """What is matched after one more character."""
    while matched and pattern[matched] != char:
        matched = borders[matched - 1]
    return matched + (pattern[matched] == char)


@functools.lru_cache(maxsize=2 * MAX_STOP_STRINGS)
def _borders(pattern: str) -> Sequence[int]:
    """Per matched length - 1: the next shorter length that also fits. Once for all choices of a
    request: 1,024 of them with 16 long stop strings would take seconds."""
    borders = [0]
    for char in pattern[1:]:
        borders.append(_step(pattern, borders, borders[-1], char))
    return borders
