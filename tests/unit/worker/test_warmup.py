"""Plans of start-up are legal for every configuration, and the largest one is full."""

from hypothesis import given
from hypothesis import strategies as st

from aioengine.messages import StepPlan
from aioengine.worker.warmup import largest_plan, warm_up_plans

sizes = st.integers(1, 100)


def check_legal(plan: StepPlan, max_model_len: int, block_size: int) -> None:
    for step in plan.steps:
        end = step.start + len(step.token_ids)
        assert step.token_ids
        assert end <= max_model_len
        held = -(-step.start // block_size) + len(step.new_block_ids)
        assert held == -(-end // block_size)
        assert not any(step.new_block_ids), "only the null block is written"


@given(max_tokens=sizes, max_model_len=sizes, block_size=sizes)
def test_warm_up_plans(max_tokens: int, max_model_len: int, block_size: int) -> None:
    plans = warm_up_plans(max_tokens, max_model_len, block_size)
    for plan in plans:
        check_legal(plan, max_model_len, block_size)
        assert plan.num_tokens <= max_tokens
    assert 2 <= len(plans) <= 4 or max_model_len == 1


@given(max_tokens=sizes, max_model_len=sizes, max_num_seqs=sizes, block_size=sizes)
def test_largest_plan(
    max_tokens: int, max_model_len: int, max_num_seqs: int, block_size: int
) -> None:
    num_slots = min(max_num_seqs, max_tokens)
    plan = largest_plan(max_tokens, max_model_len, num_slots, block_size)
    check_legal(plan, max_model_len, block_size)
    assert plan.num_tokens == min(max_tokens, num_slots * max_model_len)
    assert sum(step.sample for step in plan.steps) == num_slots
