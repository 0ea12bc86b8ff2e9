"""What steps move and compute, and what share of the limits that is."""

from dataclasses import replace

import msgspec
import pytest
from support.replicas import MODEL

from aioengine.bench.roofline_machine import Bandwidth, Machine, MatmulRate
from aioengine.bench.roofline_work import (
    Limits,
    Model,
    Phase,
    Work,
    judge,
    layer_linears,
    step_work,
)
from aioengine.bench.step_work import Step, full_decodes
from aioengine.messages import SlotStep, StepPlan

SMOLLM2 = msgspec.structs.replace(
    MODEL,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
)
LAYER_WEIGHTS = 576 * (576 + 2 * 192) + 576 * 576 + 576 * 2 * 1536 + 1536 * 576
NUM_WEIGHTS = 30 * LAYER_WEIGHTS + 49152 * 576
KV_TOKEN_BYTES = 2 * 30 * 192 * 2
BFLOAT16 = Model(SMOLLM2, "bfloat16", 2 * NUM_WEIGHTS, KV_TOKEN_BYTES)


def plan_of(*spans: tuple[int, int]) -> StepPlan:
    """Requests by the position they begin at and how many tokens they get."""
    return StepPlan(
        (),
        tuple(
            SlotStep(slot, 0, start, (7,) * length, (), True)
            for slot, (start, length) in enumerate(spans)
        ),
    )


def test_what_a_plan_is() -> None:
    step = Step.of(1.5, plan_of((100, 1), (0, 3), (10, 2)))
    assert (step.num_requests, step.num_tokens, step.num_sampled) == (3, 6, 3)
    assert step.num_kv_tokens == 101 + 3 + 12
    assert step.num_pairs == 101 + (1 + 2 + 3) + (11 + 12)
    assert not step.is_decode
    assert Step.of(0.0, plan_of((5, 1), (9, 1))).is_decode


def test_decodes_are_timed_from_one_to_the_next_of_the_same_size() -> None:
    plans = [plan_of((0, 8)), plan_of((8, 1)), plan_of((9, 1)), plan_of((10, 1), (4, 1))]
    steps = [Step.of(ended_s, plan) for ended_s, plan in zip((1, 2, 4, 8), plans, strict=True)]
    assert full_decodes(steps, 1) == [(2, steps[2])]
    assert full_decodes(steps, 2) == []


def test_linear_layers_hold_the_weights() -> None:
    assert sum(linear.num_weights for linear in layer_linears(SMOLLM2)) == LAYER_WEIGHTS
    assert 134e6 < NUM_WEIGHTS < 135e6


def test_a_decode_reads_weights_and_context() -> None:
    work = step_work(BFLOAT16, Step.of(0.0, plan_of((511, 1), (255, 1))))
    assert work.num_bytes == 2 * NUM_WEIGHTS + 768 * KV_TOKEN_BYTES
    assert work.num_flops == 2 * 2 * NUM_WEIGHTS + 4 * 768 * 576 * 30


def test_a_prefill_computes_attention() -> None:
    """Of a prompt of 2,047 tokens: 145 GFLOP, as FINDINGS has it; the head for one token."""
    work = step_work(BFLOAT16, Step.of(0.0, plan_of((0, 2047))))
    attention = 4 * (2047 * 2048 // 2) * 576 * 30
    assert attention == pytest.approx(145e9, rel=0.01)
    assert work.num_flops == 2 * (2047 * 30 * LAYER_WEIGHTS + 49152 * 576) + attention
    chunks = [step_work(BFLOAT16, Step.of(0.0, plan_of(span))) for span in ((0, 2000), (2000, 47))]
    assert sum(chunks, Work(0, 0)).num_flops == work.num_flops + 2 * 49152 * 576


def test_shares() -> None:
    step = Step.of(0.0, plan_of((0, 1)))
    work = step_work(BFLOAT16, step)
    limits = Limits(bytes_per_s=work.num_bytes / 0.5, flops_per_s=work.num_flops / 0.25)
    share = judge(BFLOAT16, Phase("decode, 1 stream", [step], 1.0, 1), limits)
    assert (share.of_memory, share.of_matmul, share.limit) == (0.5, 0.25, "memory")
    assert (share.tokens_per_s, share.limit_tokens_per_s) == (1.0, 2.0)
    twice = judge(BFLOAT16, Phase("prefill", [step, step], 2.0, 1), limits)
    assert (twice.of_memory, twice.limit_tokens_per_s) == (0.5, 1.0)


def machine(bytes_per_s: float, flops_per_s: float, weight_bytes_per_s: float) -> Machine:
    reads = tuple(
        Bandwidth(size, threads, bytes_per_s * threads)
        for size in (2 * NUM_WEIGHTS, 1 << 30)
        for threads in (1, 2)
    )
    rates = tuple(
        MatmulRate(dtype, 32, flops_per_s * factor, weight_bytes_per_s)
        for dtype, factor in (("bfloat16", 2), ("float32", 1))
    )
    return Machine(reads, rates)


def test_half_a_type_may_be_computed_in_float32_but_not_the_other_way() -> None:
    rates = (MatmulRate("bfloat16", 32, 5, 1), MatmulRate("float32", 32, 7, 1))
    found = replace(machine(10, 7, 5), matmuls=rates)
    assert found.limits(BFLOAT16, 1).flops_per_s == 7
    found = replace(found, matmuls=(replace(rates[0], flops_per_s=9), rates[1]))
    assert found.limits(BFLOAT16, 1).flops_per_s == 9
    assert found.limits(replace(BFLOAT16, dtype="float32"), 1).flops_per_s == 7


def test_limits_are_the_best_that_was_seen() -> None:
    quiet, noisy = machine(10, 7, 5), machine(8, 9, 50)
    assert quiet.limits(BFLOAT16, 2) == Limits(20, 14)
    assert noisy.limits(BFLOAT16, 1) == Limits(50, 18)
    both = quiet.best_with(noisy)
    assert both.limits(BFLOAT16, 2) == Limits(50, 18)
    assert both.bandwidths == quiet.bandwidths
