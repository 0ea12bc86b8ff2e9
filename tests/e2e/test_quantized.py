"""Weights in 8 and 4 bits give the same tokens on every layout, and predict a text as well."""

import aiohttp
import pytest
from support.golden_rows import complete
from support.launching import SHARED, STORIES, Launch, golden
from support.perplexity import open_worker, perplexity, text_ids

from aioengine.layers.quantized import PackedParameter

pytestmark = pytest.mark.skipif(not SHARED.exists(), reason="needs the shared models")


async def tokens(*flags: str, num_ranks: int = 1) -> list[list[int]]:
    with Launch("--model", str(STORIES), *flags, num_ranks=num_ranks) as launch:
        async with aiohttp.ClientSession(launch.wait_ready()) as session:
            return [
                (await complete(session, row))["token_ids"] for row in golden("stories260k_greedy")
            ]


async def test_layouts_agree() -> None:
    """Ranks of a tp group cut attention between groups: 32 of 64 inputs each. The 172 inputs of
    the down projection are cut within one, so that its groups differ; pp changes nothing."""
    flags = ("--quantization", "int8", "--dtype", "float32")
    alone = await tokens(*flags)
    assert await tokens(*flags, "-pp", "2", num_ranks=2) == alone
    halved = await tokens(*flags, "-tp", "2", num_ranks=2)
    first_tokens = [ids[:8] for ids in alone]
    assert [ids[:8] for ids in halved] == first_tokens


@pytest.mark.parametrize(("quantization", "limit"), [("int8", 1.01), ("int4", 1.05)])
def test_perplexity(quantization: str, limit: float) -> None:
    """Of a model whose weights are floats, on a text that is not of its kind."""
    ids = text_ids(str(STORIES), 500)
    floats = perplexity(ids, model=str(STORIES), dtype="bfloat16", quantization="none")
    found = perplexity(ids, model=str(STORIES), dtype="bfloat16", quantization=quantization)
    assert found < limit * floats


def test_perplexity_of_packed_gguf() -> None:
    """The default model, as it is stored: what x loses in 8 bits is nearly nothing."""
    ids = text_ids(None, 1024)
    assert len(ids) >= 1000
    floats = perplexity(ids, dtype="bfloat16", quantization="none")
    assert perplexity(ids, dtype="bfloat16", quantization="auto") < 1.01 * floats


def test_a_trainer_sees_what_a_parameter_is() -> None:
    worker = open_worker(model=str(STORIES), dtype="float32", quantization="int8")
    parameters = dict(worker.stage.named_parameters())
    weight = parameters["model.layers.0.self_attn.q_proj.weight"]
    assert isinstance(weight, PackedParameter)
    assert (weight.format.name, weight.shape_OI) == ("int8", (64, 64))
    assert not isinstance(parameters["model.norm.weight"], PackedParameter)
    worker.call("close", {})
