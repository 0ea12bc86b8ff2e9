"""Log probabilities in the forms that clients read."""

import codecs
import math
from collections.abc import Sequence

from aioengine.api.answers import (
    LEAST_LOGPROB,
    ChatLogprobs,
    ChosenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
)
from aioengine.frontend.records import ChoiceSpec
from aioengine.frontend.tokenizer import Tokenizer
from aioengine.messages import TokenLogprobs


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> ChatLogprobs:
    """Of tokens that follow each other."""

    def best(token_id: int, logprob: float) -> TokenLogprob:
        text, token_bytes = tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)
        return TokenLogprob(text, finite(logprob), list(token_bytes))

    return ChatLogprobs(
        [
            ChosenLogprob(
                tokenizer.token_text(token_id),
                finite(item.logprob),
                list(tokenizer.token_bytes(token_id)),
                [best(top_id, logprob) for top_id, logprob in item.top],
            )
            for token_id, item in zip(token_ids, logprobs, strict=True)
        ]
    )


class CompletionTokens:
    """Describes the tokens of one choice as they come.

    `text_offset` counts in the text that the client gets: a special token that is not shown takes
    no room in it, and tokens that share a character begin at that character.
    """

    def __init__(self, tokenizer: Tokenizer, *, skips_special_tokens: bool, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._hidden_ids = tokenizer.special_ids if skips_special_tokens else frozenset()
        self._num_top = num_top
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def of_prompt(self, spec: ChoiceSpec, logprobs: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Of the prompt that the text begins with; nothing predicts its first token.

        Its tokens may spell more than its text: SentencePiece puts a space before the first word.
        """
        described = self.describe(spec.prompt_ids, [None, *logprobs])
        surplus = self._offset - len(spec.echo)
        described.text_offset = [max(0, offset - surplus) for offset in described.text_offset]
        self._offset = len(spec.echo)
        self._utf8.reset()
        return described

    def describe(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobs:
        """Of the next tokens; None where nothing predicts one."""
        tokens = [self._tokenizer.token_text(token_id) for token_id in token_ids]
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            if token_id not in self._hidden_ids:
                self._offset += len(self._utf8.decode(self._tokenizer.token_bytes(token_id)))
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[None if item is None else finite(item.logprob) for item in logprobs],
            top_logprobs=[
                None if item is None else self._best(token, item)
                for token, item in zip(tokens, logprobs, strict=True)
            ],
            text_offset=offsets,
        )

    def _best(self, token: str, item: TokenLogprobs) -> dict[str, float]:
        best = {token: finite(item.logprob)}
        for top_id, logprob in item.top[: self._num_top]:
            best[self._tokenizer.token_text(top_id)] = finite(logprob)
        return best


def prompt_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    num_top: int,
) -> PromptLogprobs:
    """vLLM's form, with the `num_top` best of each position."""
    described: PromptLogprobs = [None]
    for token_id, item in zip(token_ids[1:], logprobs, strict=True):
        own = PromptLogprob(finite(item.logprob), item.rank, tokenizer.token_text(token_id))
        position = {str(token_id): own}
        for rank, (top_id, logprob) in enumerate(item.top[:num_top], start=1):
            if top_id != token_id:
                text = tokenizer.token_text(top_id)
                position[str(top_id)] = PromptLogprob(finite(logprob), rank, text)
        described.append(position)
    return described


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )
