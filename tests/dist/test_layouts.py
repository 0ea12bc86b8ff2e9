"""Sharded equals unsharded: real ranks draw the same tokens and see the same distributions (within
1e-4) as one rank alone, with several plans in flight."""

from pathlib import Path

import msgspec
import pytest
from support.random_llama import write_random_llama
from support.ranks import run_ranks
from support.worker_ranks import run_worker

from aioengine.messages import Sampled, StepResult

MODELS = {
    "9/3 tied": {"num_heads": 9, "num_kv_heads": 3, "tied": True, "biases": False},
    "8/2 biases": {"num_heads": 8, "num_kv_heads": 2, "tied": False, "biases": True},
}


def distribution(sampled: Sampled) -> list[float]:
    """Log probabilities of the whole vocabulary, in its order."""
    return [logprob for _, logprob in sorted(sampled.logprobs[0].top)]


@pytest.mark.parametrize(
    ("model", "tp_size", "pp_size"),
    [
        ("9/3 tied", 2, 1),
        ("9/3 tied", 1, 3),
        ("9/3 tied", 2, 2),
        ("8/2 biases", 3, 1),
        ("8/2 biases", 2, 2),
    ],
)
def test_equals_one_rank(tmp_path: Path, model: str, tp_size: int, pp_size: int) -> None:
    write_random_llama(tmp_path, **MODELS[model])
    result_file = tmp_path / "results"
    run_ranks(
        "support.worker_ranks",
        tp_size * pp_size,
        str(tmp_path),
        str(tp_size),
        str(pp_size),
        str(result_file),
    )
    found = msgspec.msgpack.decode(result_file.read_bytes(), type=list[StepResult])
    expected = run_worker(str(tmp_path), 1, 1, 0)
    assert [result.seq for result in found] == [result.seq for result in expected]
    num_sampled = 0
    for mine, reference in zip(found, expected, strict=True):
        for one, other in zip(mine.sampled, reference.sampled, strict=True):
            assert (one.slot, one.epoch, one.token_ids) == (
                other.slot,
                other.epoch,
                other.token_ids,
            )
            assert distribution(one) == pytest.approx(distribution(other), abs=1e-4)
            num_sampled += 1
    assert num_sampled > 30
