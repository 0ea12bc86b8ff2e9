"""Weights in 8 and 4 bits give the same tokens on every layout, and predict a text as well."""

from contextlib import ExitStack

import aiohttp
import pytest
from support.golden_rows import complete
from support.launching import SHARED, STORIES, Launch, golden
from support.perplexity import open_worker, perplexity, text_ids

from aioengine.layers.quantized import PackedParameter

pytestmark = pytest.mark.skipif(not SHARED.exists(), reason="needs the shared models")


async def tokens(launch: Launch) -> list[list[int]]:
    async with aiohttp.ClientSession(launch.wait_ready()) as session:
        rows = golden("stories260k_greedy")
        return [(await complete(session, row))["token_ids"] for row in rows]


async def test_layouts_agree() -> None:
    """Ranks of a tp group cut attention between groups: 32 of 64 inputs each. The 172 inputs of
    the down projection are cut within one, so that its groups differ; pp changes nothing."""
    flags = ("--model", str(STORIES), "--quantization", "int8", "--dtype", "float32")
    with ExitStack() as stack:  # they start at the same time
        launches = [
            stack.enter_context(Launch(*flags, *layout, num_ranks=num_ranks))
            for layout, num_ranks in (((), 1), (("-pp", "2"), 2), (("-tp", "2"), 2))
        ]
        alone, staged, halved = [await tokens(launch) for launch in launches]
    assert staged == alone
    assert [ids[:8] for ids in halved] == [ids[:8] for ids in alone]


@pytest.mark.parametrize(("quantization", "limit"), [("int8", 1.01), ("int4", 1.05)])
def test_perplexity(quantization: str, limit: float) -> None:
    """Of a model whose weights are floats, on a text that is not of its kind."""
    ids = text_ids(str(STORIES), 500)
    floats = perplexity(ids, model=str(STORIES), dtype="bfloat16", quantization="none")
    found = perplexity(ids, model=str(STORIES), dtype="bfloat16", quantization=quantization)
    assert found < limit * floats


def test_perplexity_of_packed_gguf() -> None:
    """The default model, as it is stored: what x loses in 8 bits is nearly nothing."""
    ids = text_ids(None, 512)
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
