"""The sampler: distributions, filters, independence of rows, and rows that cannot be used."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from aioengine.kernels import sampling as kernels
from aioengine.kernels.codegen import entry
from aioengine.messages import Sampled, SlotParams
from aioengine.worker import sampler as sampler_module
from aioengine.worker.philox import uniforms
from aioengine.worker.sampler import ROW_PARAMS, Sampler, SamplingBatch, SamplingRows, row_params

VOCAB_SIZE = 2000


def slot_params(
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    logprobs: int | None = None,
    choice: int = 0,
) -> SlotParams:
    return SlotParams(temperature, top_k, top_p, min_p, seed, choice, logprobs)


def batch_of(params: list[SlotParams], positions: list[int] | None = None) -> SamplingBatch:
    num = len(params)
    table = np.array([row_params(row) for row in params], ROW_PARAMS)
    rows = SamplingRows(np.arange(num), np.arange(num) + 10, table)
    return SamplingBatch(rows, np.array(positions or range(num)))


def sample(
    logits_RV: Tensor, batch: SamplingBatch, sampler: Sampler | None = None
) -> tuple[Sampled, ...]:
    sampler = sampler or Sampler("raw_logprobs")
    return sampler.report(logits_RV, logits_RV, sampler.draw(logits_RV, batch), batch)


def random_logits(num_rows: int, vocab_size: int = VOCAB_SIZE) -> Tensor:
    return 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(7))


def drawn_ids(logits_V: Tensor, params: SlotParams, num_draws: int) -> Tensor:
    batch = batch_of([params] * num_draws)
    logits_RV = logits_V.expand(num_draws, -1).contiguous()
    return Sampler("raw_logprobs").draw(logits_RV, batch).ids_R


def test_greedy_takes_the_best() -> None:
    logits_RV = random_logits(5)
    results = sample(logits_RV, batch_of([slot_params(temperature=0.0)] * 5))
    assert [result.token_ids[0] for result in results] == logits_RV.argmax(1).tolist()
    assert [(result.slot, result.epoch) for result in results] == [(i, i + 10) for i in range(5)]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    logits_V = random_logits(1, 12)[0]
    ids = drawn_ids(logits_V, slot_params(temperature=temperature, seed=11), 20000)
    expected = (logits_V / temperature).softmax(0) * 20000
    common = expected >= 5
    counts = ids.bincount(minlength=12)
    chi_square = ((counts - expected) ** 2 / expected)[common].sum()
    assert chi_square < 31.3  # 99.9 % quantile, 11 degrees of freedom


@pytest.mark.parametrize("axis", ["seed", "choice", "position"])
def test_draws_along_each_axis_are_independent(axis: str) -> None:
    """Pairs of neighbours, in a table of 4 × 4 outcomes: seeds 0 and 1, choices 0 and 1, …"""
    num = 8000
    numbers = range(num)
    params = [
        slot_params(seed=i if axis == "seed" else 9, choice=i if axis == "choice" else 0)
        for i in numbers
    ]
    probs_V = torch.tensor([0.4, 0.3, 0.2, 0.1])
    batch = batch_of(params, [i if axis == "position" else 5 for i in numbers])
    ids = Sampler("raw_logprobs").draw(probs_V.log().expand(num, -1).contiguous(), batch).ids_R
    for distance in (1, 2):
        pairs = (4 * ids[:-distance] + ids[distance:]).bincount(minlength=16)
        expected = torch.outer(probs_V, probs_V).flatten() * (num - distance)
        chi_square = ((pairs - expected) ** 2 / expected).sum()
        assert chi_square < 37.7  # 99.9 % quantile, 15 degrees of freedom


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (slot_params(top_k=2), {0, 1}),
        (slot_params(top_p=0.75), {0, 1}),
        (slot_params(top_p=0.49), {0}),
        (slot_params(top_p=1e-9), {0}),
        (slot_params(min_p=0.25), {0, 1, 2}),
        (slot_params(top_k=3, top_p=0.85), {0, 1}),  # 0.8 of 0.9375 is more than 0.85
        (slot_params(top_k=10000), {0, 1, 2, 3}),
    ],
)
def test_filters_keep_the_most_probable(params: SlotParams, kept: set[int]) -> None:
    probs = torch.tensor([0.5, 0.3, 0.1375, 0.0625])
    assert set(drawn_ids(probs.log(), params, 500).tolist()) == kept


def test_top_p_beyond_what_is_sorted_first() -> None:
    logits_V = torch.zeros(4000)
    logits_V[3000:] = -1.0
    ids = drawn_ids(logits_V, slot_params(top_p=0.8), 2000)
    assert ids.max() < 3000  # 3000 / (3000 + 1000 / e) = 0.89: the first 3000 tie
    assert len(ids.unique()) > 1000


def test_a_row_does_not_depend_on_the_others() -> None:
    params = [
        slot_params(seed=1),
        slot_params(temperature=0.0),
        slot_params(seed=2, top_k=5),
        slot_params(seed=3, top_p=0.9),
        slot_params(seed=4, top_k=50, top_p=0.5, min_p=0.01),
        slot_params(seed=5, temperature=0.3, top_p=0.999),
    ]
    logits_RV, positions = random_logits(len(params)), [3, 1, 4, 1, 5, 9]
    together = sample(logits_RV, batch_of(params, positions))
    for row, one in enumerate(params):
        alone = sample(logits_RV[row : row + 1], batch_of([one], [positions[row]]))
        assert alone[0].token_ids == together[row].token_ids


def test_the_seed_and_the_position_decide() -> None:
    logits_V = random_logits(1)[0]
    first = drawn_ids(logits_V, slot_params(seed=1), 50)
    assert torch.equal(first, drawn_ids(logits_V, slot_params(seed=1), 50))
    assert not torch.equal(first, drawn_ids(logits_V, slot_params(seed=2), 50))
    assert len(first.unique()) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_unusable_rows_end_alone(poison: float, temperature: float) -> None:
    params = [slot_params(temperature=temperature, top_p=0.9, logprobs=3)] * 3
    healthy = sample(random_logits(3), batch_of(params))
    logits_RV = random_logits(3)
    if poison == -math.inf:
        logits_RV[1] = poison
    else:
        logits_RV[1, 1234] = poison
    results = sample(logits_RV, batch_of(params))
    assert results[1].error
    assert results[1].token_ids == ()
    assert (results[0], results[2]) == (healthy[0], healthy[2])


def test_extreme_temperatures() -> None:
    logits_V = random_logits(1)[0]
    best = int(logits_V.argmax())
    for temperature in (1e-30, 1e-5, 1e-4):
        ids = drawn_ids(logits_V, slot_params(temperature=temperature), 20)
        assert set(ids.tolist()) == {best}
    logits_V[1] = -math.inf  # withheld by min_tokens
    logits_V[3:] = -math.inf
    for temperature in (1e30, 1e39, 1e308):
        ids = drawn_ids(logits_V, slot_params(temperature=temperature), 1000)
        assert ids.bincount(minlength=3).tolist() == pytest.approx([500, 0, 500], abs=60)


def test_raw_logprobs_only_where_asked() -> None:
    params = [
        slot_params(logprobs=None),
        slot_params(logprobs=0),
        slot_params(temperature=0.5, top_k=1, logprobs=3),
        slot_params(temperature=0.0, logprobs=VOCAB_SIZE + 5),
    ]
    logits_RV = random_logits(4)
    results = sample(logits_RV, batch_of(params))
    expected_RV = logits_RV.log_softmax(1)
    assert results[0].logprobs == ()
    for row, num_top in ((1, 0), (2, 3), (3, VOCAB_SIZE)):
        (found,) = results[row].logprobs
        chosen = results[row].token_ids[0]
        assert found.logprob == pytest.approx(float(expected_RV[row, chosen]), abs=1e-5)
        best = expected_RV[row].topk(num_top)
        assert [token_id for token_id, _ in found.top] == best.indices.tolist()
        assert [value for _, value in found.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_processed_logprobs_are_those_after_temperature() -> None:
    logits_RV = random_logits(2)
    params = [slot_params(temperature=0.5, top_k=3, logprobs=2), slot_params(0.0, logprobs=2)]
    results = sample(logits_RV, batch_of(params), Sampler("processed_logprobs"))
    for row, divisor in ((0, 0.5), (1, 1.0)):
        expected_V = (logits_RV[row] / divisor).log_softmax(0)
        (found,) = results[row].logprobs
        assert found.top[0][1] == pytest.approx(float(expected_V.max()), abs=1e-5)


# --- compiled draws ------------------------------------------------------------------------------

LIMITS = [
    {},
    {"temperature": 0.3},
    {"temperature": 40.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": VOCAB_SIZE + 5},
    {"min_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"top_p": 0.999999, "temperature": 3.0},
    {"top_k": 50, "top_p": 0.7, "min_p": 0.01, "temperature": 1.3},
]


@pytest.mark.parametrize("num_levels", [None, 5], ids=["no ties", "ties"])
def test_compiled_draws_are_those_of_torch(
    num_levels: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [slot_params(**limits, seed=i) for i in range(20) for limits in LIMITS]
    logits_RV = random_logits(len(params))
    if num_levels is not None:
        logits_RV = (logits_RV * num_levels / 10).round()
    logits_RV[::3, ::2] = -math.inf
    batch = batch_of(params)
    assert sampler_module._draw_kernel() is not None
    compiled = Sampler("raw_logprobs").draw(logits_RV, batch)
    monkeypatch.setattr(sampler_module, "_draw_kernel", lambda: None)
    plain = Sampler("raw_logprobs").draw(logits_RV, batch)
    assert compiled.ids_R.tolist() == plain.ids_R.tolist()
    assert compiled.best_R.equal(plain.best_R)


@pytest.mark.parametrize("limits", LIMITS)
def test_unusable_rows_get_valid_ids_from_compiled_draws(limits: dict[str, Any]) -> None:
    logits_RV = random_logits(4)
    logits_RV[0, 5] = math.nan
    logits_RV[1, 6] = math.inf
    logits_RV[2] = -math.inf
    draws = Sampler("raw_logprobs").draw(logits_RV, batch_of([slot_params(**limits)] * 4))
    assert ((draws.ids_R >= 0) & (draws.ids_R < VOCAB_SIZE)).all()
    assert draws.best_R.isfinite().tolist() == [False, False, False, True]


@entry
def compiled_uniform(seed: int, position: int, choice: int) -> float:
    return kernels.uniform(seed, position, choice)


def test_the_compiled_generator_is_the_same() -> None:
    generator = np.random.default_rng(5)
    seeds = generator.integers(0, 2**63, 200, dtype=np.uint64)
    positions, choices = generator.integers(0, 2**20, 200), generator.integers(0, 128, 200)
    found = [compiled_uniform(*row) for row in zip(seeds, positions, choices, strict=True)]
    assert found == uniforms(seeds, positions, choices).tolist()
