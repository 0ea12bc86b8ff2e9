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
    """CVE-2026-54235 (GHSA-7h4p-rffg-7823): NaN and infinities pass comparisons with bounds, and
    make logits of which nothing can be drawn."""
    await check_refused(path, {**base, field: value}, field)
    await check_refused(path, {**base, "logit_bias": {"1": value}}, "logit_bias")


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, 2**31 - 1, 2**31, 2**64, -1, -(2**31)])
@pytest.mark.parametrize("field", ["prompt", "stop_token_ids", "logit_bias"])
async def test_ids_beyond_the_vocabulary(field: str, token_id: int) -> None:
    """Ids that index embeddings or logits on a device: CVE-2026-116174 (prompts), CVE-2026-116181
    (ids to stop at), vllm-project/vllm#16529 (biases). There, one request ends the engine or writes
    into its neighbours' rows."""
    value = {str(token_id): 1} if field == "logit_bias" else [token_id]
    body = {**PROMPT, "min_tokens": 1, field: value}
    await check_refused(COMPLETIONS, body, field)


@pytest.mark.parametrize("number", [21, 2**31, 2**32 + 1, 2**63, 2**64 + 1, -1, -(2**32)])
@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs", "top_logprobs"])
async def test_more_log_probabilities_than_there_are(field: str, number: int) -> None:
    """CVE-2026-116172: a number that was too large, or wrapped, ended the engine."""
    if field == "top_logprobs":
        await check_refused(CHAT, {**MESSAGES, "logprobs": True, field: number}, field)
    else:
        await check_refused(COMPLETIONS, {**PROMPT, field: number}, field)


@pytest.mark.parametrize(("path", "base"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
@pytest.mark.parametrize("fields", [{}, {"max_tokens": None}, {"max_tokens": 4}])
async def test_more_tokens_at_least_than_at_most(
    path: str, base: dict[str, Any], fields: dict[str, Any]
) -> None:
    """CVE-2026-114051 (GHSA-4xqp-c3mv-qff7): min_tokens was compared with max_tokens only where the
    request had one; the engine found out later, and ended."""
    await check_refused(path, {**base, **fields, "min_tokens": 2**31 - 1}, "min_tokens")


async def check_refused(path: str, body: dict[str, Any], param: str) -> None:
    async with serving(max_concurrent_requests=5000) as server:
        answer = await server.post(path, json.dumps(body).encode())
        assert (answer.status, answer.error["param"]) == (400, param)
        assert not server.leader.of(AddRequest)
        assert server.front_end.num_live == 0
