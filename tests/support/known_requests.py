"""Requests whose tokens are known: what one rank alone gives, each request by itself."""

import random
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from support.launching import STORIES, Launch, post

NUM_KNOWN: Final = 8
MAX_TOKENS: Final = 300
TIE_GAP: Final = 1e-3
"""Log probabilities this close may change places with the layout or the batch."""


@dataclass(frozen=True, slots=True)
class KnownRequest:
    """A greedy request and the tokens that it must give."""

    body: dict[str, Any]
    token_ids: list[int]

    def first(self, max_tokens: int) -> "KnownRequest":
        """The same, shorter."""
        return KnownRequest({**self.body, "max_tokens": max_tokens}, self.token_ids[:max_tokens])


_drawn: list[KnownRequest] = []
"""Once in this process: it takes a launch."""


async def known_requests(num_requests: int, max_tokens: int) -> list[KnownRequest]:
    """What one rank gives that has nothing else to do; at most NUM_KNOWN of MAX_TOKENS."""
    assert num_requests <= NUM_KNOWN
    assert max_tokens <= MAX_TOKENS
    if not _drawn:
        with Launch("--model", str(STORIES)) as launch:
            async with aiohttp.ClientSession(launch.wait_ready()) as session:
                _drawn.extend(await _draw(session))
    return [request.first(max_tokens) for request in _drawn[:num_requests]]


async def _draw(session: aiohttp.ClientSession) -> list[KnownRequest]:
    """Requests with ties are left out, so that any layout must give the same tokens."""
    chance = random.Random(7)
    known: list[KnownRequest] = []
    while len(known) < NUM_KNOWN:
        body = {
            "prompt": [1, *(chance.randrange(3, 512) for _ in range(chance.randrange(2, 40)))],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = await post(session, "/v1/completions", {**body, "logprobs": 2})
        choice = answer["choices"][0]
        if not _has_tie(choice["logprobs"]["top_logprobs"]):
            known.append(KnownRequest(body, choice["token_ids"]))
    return known


def _has_tie(top_logprobs: list[dict[str, float]]) -> bool:
    for by_token in top_logprobs:
        best = sorted(by_token.values(), reverse=True)[:2]
        if len(best) == 2 and best[0] - best[1] < TIE_GAP:
            return True
    return False
