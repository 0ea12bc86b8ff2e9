"""Bias, min_tokens and penalties against a slow reference in plain Python, over any script of a
slot's tenants; and the distributions that are drawn from."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plans import GREEDY
from torch import Tensor

from aioengine.messages import PREV, NewSlot, SlotHistory, SlotParams, SlotStep, StepPlan
from aioengine.worker.logit_rules import LogitRules
from aioengine.worker.sampler import ROW_PARAMS, Sampler, SamplingBatch, SamplingRows, row_params

VOCAB_SIZE = 13
NUM_SLOTS = 4
CPU = torch.device("cpu")


def rules_of(vocab_size: int = VOCAB_SIZE, num_slots: int = NUM_SLOTS) -> LogitRules:
    return LogitRules(num_slots, vocab_size, CPU)


def params_with(**changes: Any) -> SlotParams:
    return msgspec.structs.replace(GREEDY, **changes)


def reference(
    logits: Sequence[float], params: SlotParams, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """One row, one token after the other."""
    row = list(logits)
    if len(output) < params.min_tokens:
        for token_id in params.stop_token_ids:
            row[token_id] = -math.inf
    for token_id, bias in params.logit_bias:
        row[token_id] += bias
    for token_id in {*prompt, *output}:
        value = row[token_id]
        penalty = params.repetition_penalty
        row[token_id] = value / penalty if value > 0 else value * penalty
    for token_id in set(output):
        row[token_id] -= params.frequency_penalty * output.count(token_id)
        row[token_id] -= params.presence_penalty
    return row


@dataclass
class Tenant:
    """A request in a slot, told to the rules as a scheduler would."""

    slot: int
    epoch: int
    params: SlotParams
    tokens: list[int]
    """Prompt and the output so far (some of it from before a preemption)."""
    num_told: int = 0
    has_prev: bool = False
    history: tuple[int, ...] = field(default=())

    @property
    def num_prompt(self) -> int:
        return self.params.num_prompt_tokens


def sampling_batch(tenants: Sequence[Tenant]) -> SamplingBatch:
    rows = SamplingRows(
        np.array([t.slot for t in tenants], np.int64),
        np.array([t.epoch for t in tenants], np.int64),
        np.array([row_params(t.params) for t in tenants], ROW_PARAMS),
    )
    return SamplingBatch(rows, np.array([len(t.tokens) for t in tenants], np.int64))


tokens = st.integers(0, VOCAB_SIZE - 1)
logit_values = st.floats(-8, 8, width=32)


@st.composite
def slot_params(draw: st.DrawFn) -> dict[str, Any]:
    """Any mix of rules; often none."""
    rules = {
        "repetition_penalty": st.sampled_from([0.5, 1.2, 2.0]),
        "frequency_penalty": st.sampled_from([-1.5, 0.3, 2.0]),
        "presence_penalty": st.sampled_from([-2.0, 0.7]),
        "min_tokens": st.integers(1, 4),
        "logit_bias": st.dictionaries(tokens, st.floats(-100, 100, width=16), max_size=4).map(
            lambda entries: tuple(entries.items())
        ),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(rules)), max_size=5))
    values = {name: draw(rules[name]) for name in sorted(chosen)}
    if "min_tokens" in values:
        values["stop_token_ids"] = tuple(draw(st.sets(tokens, max_size=3)))
    return values


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_script_equals_the_reference(data: st.DataObject) -> None:
    """Slots change tenants; prompts come in chunks, behind history, again after preemption with
    output among the literals; draws come back as PREV or as the literal id."""
    rules = rules_of()
    tenants: dict[int, Tenant] = {}
    for epoch in range(1, data.draw(st.integers(2, 14))):
        new, history, steps, sampling = [], [], [], []
        slots = data.draw(st.sets(st.integers(0, NUM_SLOTS - 1), min_size=1))
        for slot in sorted(slots):
            tenant = tenants.get(slot)
            if tenant is None or data.draw(st.integers(0, 4)) == 0:
                known = data.draw(st.lists(tokens, min_size=1, max_size=9))
                num_prompt = data.draw(st.integers(1, len(known)))
                asked = data.draw(slot_params())
                params = params_with(num_prompt_tokens=num_prompt, **asked)
                tenant = tenants[slot] = Tenant(slot, epoch, params, known)
                new.append(NewSlot(slot, epoch, params))
                num_cached = data.draw(st.integers(0, len(known) - 1))
                tenant.num_told = num_cached
                if num_cached:
                    history.append(SlotHistory(slot, epoch, tuple(known[:num_cached])))
            start = tenant.num_told
            if start == len(tenant.tokens) - 1 and tenant.has_prev:
                ids: tuple[int, ...] = (
                    (PREV,) if data.draw(st.booleans()) else (tenant.tokens[start],)
                )
            else:
                end = data.draw(st.integers(start + 1, len(tenant.tokens)))
                ids = tuple(tenant.tokens[start:end])
            tenant.num_told += len(ids)
            is_sampling = tenant.num_told == len(tenant.tokens)
            steps.append(SlotStep(slot, tenant.epoch, start, ids, (), is_sampling))
            if is_sampling:
                sampling.append(tenant)
        rules.observe(StepPlan(tuple(new), tuple(steps), history=tuple(history)))
        if sampling:
            check_step(data, rules, sampling)


def check_step(data: st.DataObject, rules: LogitRules, sampling: list[Tenant]) -> None:
    row = st.lists(logit_values, min_size=VOCAB_SIZE, max_size=VOCAB_SIZE)
    logits = [data.draw(row) for _ in sampling]
    logits_RV = torch.tensor(logits)
    before_RV = logits_RV.clone()
    batch = sampling_batch(sampling)
    processed_RV = rules.process(logits_RV, batch)
    assert torch.equal(logits_RV, before_RV)
    for row_values, tenant, processed in zip(logits, sampling, processed_RV.tolist(), strict=True):
        prompt, output = tenant.tokens[: tenant.num_prompt], tenant.tokens[tenant.num_prompt :]
        expected = reference(row_values, tenant.params, prompt, output)
        assert processed == pytest.approx(expected, rel=1e-5, abs=1e-5)
    drawn = [data.draw(tokens) for _ in sampling]
    rules.record(batch, torch.tensor(drawn))
    for tenant, token_id in zip(sampling, drawn, strict=True):
        tenant.tokens.append(token_id)
        tenant.has_prev = True


# --- what it costs ------------------------------------------------------------------------------


def tell(rules: LogitRules, *tenants: Tenant) -> SamplingBatch:
    """Prefills of whole prompts."""
    rules.observe(
        StepPlan(
            tuple(NewSlot(t.slot, t.epoch, t.params) for t in tenants),
            tuple(SlotStep(t.slot, t.epoch, 0, tuple(t.tokens), (), True) for t in tenants),
        )
    )
    return sampling_batch(tenants)


def tenant(slot: int, prompt: list[int], epoch: int = 1, **rules: Any) -> Tenant:
    params = params_with(num_prompt_tokens=len(prompt), **rules)
    return Tenant(slot, epoch, params, list(prompt))


def test_without_rules_nothing_is_copied_or_held() -> None:
    rules = rules_of()
    batch = tell(rules, tenant(0, [1, 2]), tenant(3, [4]))
    logits_RV = torch.randn(2, VOCAB_SIZE)
    assert rules.process(logits_RV, batch) is logits_RV
    assert rules._counts.num_rows == 0


def test_rows_are_held_for_slots_that_count_and_used_again() -> None:
    rules = rules_of(num_slots=64)
    for epoch in range(1, 40):
        counted = tenant(epoch % 3, [1], epoch, presence_penalty=1.0)
        tell(rules, counted, tenant(60, [1], epoch))
    assert rules._counts.num_rows == 4
    for slot in range(64):
        tell(rules, tenant(slot, [1], 100, presence_penalty=1.0))
    assert rules._counts.num_rows == 64


def test_min_tokens_withholds_exactly_so_long() -> None:
    rules = rules_of()
    one = tenant(1, [5, 6], min_tokens=2, stop_token_ids=(3, 7))
    batch = tell(rules, one)
    for num_outputs in range(4):
        processed_V = rules.process(torch.zeros(1, VOCAB_SIZE), batch)[0]
        withheld = [token_id for token_id in range(VOCAB_SIZE) if processed_V[token_id] != 0]
        assert withheld == ([3, 7] if num_outputs < 2 else [])
        one.tokens.append(3)
        batch = sampling_batch([one])


def test_an_over_run_token_does_not_reach_the_next_tenant() -> None:
    """The device drew once more for a request that had ended; then its slot is given away."""
    rules = rules_of()
    first = tenant(0, [1, 2], repetition_penalty=2.0)
    batch = tell(rules, first)
    for token_id in (8, 9):
        rules.record(batch, torch.tensor([token_id]))
        first.tokens.append(token_id)
        batch = sampling_batch([first])
    second = tenant(0, [3], epoch=2, repetition_penalty=2.0)
    processed_V = rules.process(torch.ones(1, VOCAB_SIZE), tell(rules, second))[0]
    assert [i for i in range(VOCAB_SIZE) if processed_V[i] != 1] == [3]


def test_a_row_that_nothing_can_be_drawn_from_ends_alone() -> None:
    """min_tokens withholds the whole vocabulary of one request; another has NaN from the model."""
    rules = rules_of()
    every = tuple(range(VOCAB_SIZE))
    tenants = [
        tenant(0, [1]),
        tenant(1, [1], min_tokens=1, stop_token_ids=every),
        tenant(2, [1], frequency_penalty=0.5, logprobs=2, temperature=0.8),
        tenant(3, [1], logit_bias=((2, 5.0),)),
    ]
    batch = tell(rules, *tenants)
    logits_RV = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    logits_RV[2, 4] = math.nan
    processed_RV = rules.process(logits_RV, batch)
    sampler = Sampler("raw_logprobs")
    draws = sampler.draw(processed_RV, batch)
    rules.record(batch, draws.ids_R)
    results = sampler.report(logits_RV, processed_RV, draws, batch)
    assert [bool(result.error) for result in results] == [False, True, True, False]
    assert "leave no token" in results[1].error
    assert "not finite" in results[2].error
    assert results[0].token_ids == (int(logits_RV[0].argmax()),)


# --- what is drawn and reported -----------------------------------------------------------------


def prepared(params: dict[str, Any], num_rows: int) -> tuple[LogitRules, SamplingBatch]:
    """Rows that have all seen the prompt 1 2 and the output 3 3 4, each with a seed of its own."""
    rules = rules_of(VOCAB_SIZE, num_rows)
    tenants = []
    for slot in range(num_rows):
        one = tenant(slot, [1, 2], temperature=1.0, **params)
        one.params = msgspec.structs.replace(one.params, seed=slot)
        one.tokens += [3, 3, 4]
        tenants.append(one)
    return rules, tell(rules, *tenants)


def with_params(batch: SamplingBatch, name: str, values: Any) -> SamplingBatch:
    """The same rows, but for one of their parameters."""
    params = batch.rows.params.copy()
    params[name] = values
    rows = SamplingRows(batch.rows.slots, batch.rows.epochs, params)
    return SamplingBatch(rows, batch.positions)


NUM_DRAWS = 10000
CHI_SQUARE_999 = {1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5, 6: 22.5, 7: 24.3, 8: 26.1, 9: 27.9}
CHI_SQUARE_999 |= {10: 29.6, 11: 31.3, 12: 32.9}
"""99.9 % quantiles by degrees of freedom."""


def check_draws(ids: Tensor, expected_V: Tensor) -> None:
    counts_V = ids.bincount(minlength=VOCAB_SIZE)
    assert counts_V[expected_V == 0].sum() == 0
    common = expected_V * len(ids) >= 5
    wanted = expected_V[common] * len(ids)
    chi_square = float(((counts_V[common] - wanted) ** 2 / wanted).sum())
    assert chi_square < CHI_SQUARE_999[int(common.sum()) - 1]


def keep_top_k(probs_V: Tensor, k: int) -> Tensor:
    return probs_V.where(probs_V >= probs_V.sort(descending=True).values[k - 1], 0)


def keep_min_p(probs_V: Tensor, p: float) -> Tensor:
    return probs_V.where(probs_V >= p * probs_V.max(), 0)


def keep_top_p(probs_V: Tensor, p: float) -> Tensor:
    ordered = probs_V.sort(descending=True).values
    num_kept = int((ordered.cumsum(0) < p * ordered.sum()).sum()) + 1
    return probs_V.where(probs_V >= ordered[num_kept - 1], 0)


@pytest.mark.parametrize(
    ("params", "filters"),
    [
        ({}, []),
        ({"temperature": 0.6}, []),
        ({"temperature": 1.7}, []),
        ({"top_k": 4}, [(keep_top_k, 4)]),
        ({"min_p": 0.2}, [(keep_min_p, 0.2)]),
        ({"top_p": 0.8}, [(keep_top_p, 0.8)]),
        ({"top_k": 6, "min_p": 0.1, "top_p": 0.9, "temperature": 1.3},
         [(keep_top_k, 6), (keep_min_p, 0.1), (keep_top_p, 0.9)]),
        ({"repetition_penalty": 1.5}, []),
        ({"frequency_penalty": 0.8, "presence_penalty": -0.5}, []),
        ({"repetition_penalty": 0.7, "frequency_penalty": 0.4, "presence_penalty": 0.9,
          "logit_bias": ((0, 2.0), (7, -100.0)), "min_tokens": 4, "stop_token_ids": (5,),
          "temperature": 0.9, "top_p": 0.95}, [(keep_top_p, 0.95)]),
    ],
)  # fmt: skip
def test_draws_follow_the_distribution(
    params: dict[str, Any], filters: list[tuple[Callable[[Tensor, float], Tensor], float]]
) -> None:
    logits_V = 1.5 * torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    rules = {name: value for name, value in params.items() if name != "temperature"}
    rules_state, batch = prepared(rules, 500)
    batch = with_params(batch, "temperature", params.get("temperature", 1.0))
    example = params_with(num_prompt_tokens=2, **rules)
    row = torch.tensor(reference(logits_V.tolist(), example, [1, 2], [3, 3, 4]))
    expected_V = (row / params.get("temperature", 1.0)).softmax(0)
    for keep, value in filters:
        expected_V = keep(expected_V, value)
    processed_RV = rules_state.process(logits_V.expand(500, -1).contiguous(), batch)
    drawn = []
    for turn in range(NUM_DRAWS // 500):
        batch = with_params(batch, "seed", np.arange(500) + 500 * turn)
        drawn.append(Sampler("raw_logprobs").draw(processed_RV, batch).ids_R)
    check_draws(torch.cat(drawn), expected_V / expected_V.sum())


def test_greedy_takes_the_best_of_the_penalised_logits() -> None:
    rules, batch = prepared({"frequency_penalty": 1.0}, 1)
    batch = with_params(batch, "temperature", 0.0)
    logits_V = torch.zeros(1, VOCAB_SIZE)
    logits_V[0, 3], logits_V[0, 4], logits_V[0, 9] = 2.5, 1.4, 0.6
    ids_R = Sampler("raw_logprobs").draw(rules.process(logits_V, batch), batch).ids_R
    assert ids_R.tolist() == [9]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_the_mode_says_which_logprobs_are_reported(mode: Any) -> None:
    """Processed ones are those before truncation."""
    asked = {"presence_penalty": 1.5, "logit_bias": ((8, 3.0),), "top_k": 1, "logprobs": 3}
    rules, batch = prepared(asked, 1)
    batch = with_params(batch, "temperature", 0.5)
    logits_RV = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    processed_RV = rules.process(logits_RV, batch)
    sampler = Sampler(mode)
    draws = sampler.draw(processed_RV, batch)
    (result,) = sampler.report(logits_RV, processed_RV, draws, batch)
    row = logits_RV[0]
    if mode == "processed_logprobs":
        params = params_with(num_prompt_tokens=2, **asked)
        row = torch.tensor(reference(row.tolist(), params, [1, 2], [3, 3, 4])) / 0.5
    expected_V = row.log_softmax(0)
    (found,) = result.logprobs
    assert found.logprob == pytest.approx(float(expected_V[result.token_ids[0]]), abs=1e-5)
    assert found.rank == 1 + int((expected_V > expected_V[result.token_ids[0]]).sum())
    best = expected_V.topk(3)
    assert [token_id for token_id, _ in found.top] == best.indices.tolist()
    assert [value for _, value in found.top] == pytest.approx(best.values.tolist(), abs=1e-5)
