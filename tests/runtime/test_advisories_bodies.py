"""Classes of published vLLM advisories that are about one request's body: it ends in a 400, and no
replica hears of it."""

import json
from typing import Any

import pytest
from support.http_server import CHAT, COMPLETIONS, MESSAGES, PROMPT, serving
from support.tiny_model import VOCAB_SIZE

from aioengine.messages import AddRequest

NOT_FINITE = [float("nan"), float("inf"), float("-inf")]
NUMBERS = [
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "top_k", "n", "seed", "max_tokens", "priority"),
]


@pytest.mark.parametrize(("path", "base"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
@pytest.mark.parametrize("n", [129, 10**9, 2**63, 10**30])
async def test_fan_out_by_n(path: str, base: dict[str, Any], n: int) -> None:
    """CVE-2026-34756 (GHSA-3mwp-wvh9-7528): `n` was not bounded, and each choice was made before
    any was refused."""
    await check_refused(path, {**base, "n": n}, "n")


@pytest.mark.parametrize(
    ("prompts", "n", "param"), [(1025, 1, "prompt"), (1024, 2, "n"), (9, 128, "n")]
)
async def test_fan_out_by_prompts(prompts: int, n: int, param: str) -> None:
    """The same by a list of prompts, alone or with `n`."""
    for prompt in ("a", [97]):
        await check_refused(COMPLETIONS, {"prompt": [prompt] * prompts, "n": n}, param)


@pytest.mark.parametrize(("path", "base"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("field", NUMBERS)
async def test_numbers_that_are_not_finite(
    path: str, base: dict[str, Any], value: float, field: str
) -> None:
    """NaN and infinities pass comparisons with bounds, and make logits of which nothing can be
    drawn."""
    await check_refused(path, {**base, field: value}, field)
    await check_refused(path, {**base, "logit_bias": {"1": value}}, "logit_bias")


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, 2**31 - 1, 2**31, 2**64, -1, -(2**31)])
@pytest.mark.parametrize("field", ["prompt", "stop_token_ids", "logit_bias"])
async def test_ids_beyond_the_vocabulary(field: str, token_id: int) -> None:
    """Ids that index embeddings or logits on a device (vllm-project/vllm#54195, #16529): there, one
    request ends the engine or writes into its neighbours' rows."""
    value = {str(token_id): 1} if field == "logit_bias" else [token_id]
    body = {**PROMPT, "min_tokens": 1, field: value}
    await check_refused(COMPLETIONS, body, field)


async def check_refused(path: str, body: dict[str, Any], param: str) -> None:
    async with serving(max_concurrent_requests=5000) as server:
        answer = await server.post(path, json.dumps(body).encode())
        assert (answer.status, answer.error["param"]) == (400, param)
        assert not server.leader.of(AddRequest)
        assert server.front_end.num_live == 0
