"""What BatchBuilder makes of plans, read back from the tensors of a stage's inputs."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.plans import GREEDY, ScriptedRequest
from torch import Tensor

from aioengine.layers.forward_batch import PagedInputs
from aioengine.messages import PREV, SlotParams, StepPlan
from aioengine.worker import decode_rows
from aioengine.worker.batch import BatchBuilder, Role
from aioengine.worker.decode_rows import LastIds

BLOCK_SIZE = 4
ALL_ROLES = Role(is_first=True, is_last=True, is_output=True)


@dataclass
class RecordedAttention:
    """In place of a backend: keeps its inputs, with copies of the tensors."""

    inputs: PagedInputs


def builder_with(role: Role = ALL_ROLES, num_microbatches: int = 1) -> BatchBuilder:
    return BatchBuilder(
        role,
        {},
        num_slots=4,
        max_num_batched_tokens=16,
        max_model_len=32,
        block_size=BLOCK_SIZE,
        device=torch.device("cpu"),
        attention=RecordedAttention,  # type: ignore[arg-type]  # nothing is computed
        num_microbatches=num_microbatches,
    )


def request(slot: int, first_block: int, params: SlotParams = GREEDY) -> ScriptedRequest:
    return ScriptedRequest(slot, 1, params, first_block, BLOCK_SIZE)


def unused(slots: NDArray[np.int64]) -> Tensor:
    raise AssertionError("no PREV in this plan")


def ids_of(*values: int) -> LastIds:
    return lambda slots: torch.tensor(values)


def test_rows_of_one_token_come_first() -> None:
    builder = builder_with()
    prefill, decode = request(2, first_block=5), request(0, first_block=9)
    builder.build(StepPlan((decode.new,), (decode.step([1, 2, 3, 4, 5]),)), unused)
    plan = StepPlan((prefill.new,), (prefill.step([7, 8, 9]), decode.step()), True)
    inputs = builder.build(plan, ids_of(42, 0, 0, 0))
    forward = inputs.forward
    paged = forward.attention.inputs
    assert forward.token_ids_T.tolist() == [42, 7, 8, 9]
    assert forward.positions_T.tolist() == [5, 0, 1, 2]
    assert paged.slot_mapping_T.tolist() == [10 * BLOCK_SIZE + 1, 20, 21, 22]
    assert paged.block_table_RB[0].tolist() == [9, 10]
    assert paged.block_table_RB[1, 0] == 5
    assert paged.context_lens_R.tolist() == list(paged.context_lens) == [6, 3]
    assert paged.query_lens == (1, 3)
    assert paged.num_decodes == 1
    assert inputs.sample_rows_S.tolist() == [0, 3]
    assert inputs.sampled_slots_S.tolist() == inputs.sampling.rows.slots.tolist() == [0, 2]
    assert inputs.sampling.positions.tolist() == [6, 3]


def test_prev_is_looked_up_by_slot() -> None:
    builder = builder_with()
    requests = [request(slot, first_block=1 + slot) for slot in range(3)]
    first = StepPlan(tuple(r.new for r in requests), tuple(r.step([r.new.slot]) for r in requests))
    builder.build(first, unused)
    steps = (requests[2].step(), requests[0].step([PREV]), requests[1].step([77]))
    inputs = builder.build(StepPlan((), steps), ids_of(10, 11, 12, 13))
    assert inputs.forward.token_ids_T.tolist() == [12, 10, 77]


def test_a_new_tenant_starts_with_an_empty_block_table() -> None:
    builder = builder_with()
    first = request(1, first_block=3)
    builder.build(StepPlan((first.new,), (first.step(range(9)),)), unused)
    second = ScriptedRequest(1, 2, GREEDY, 8, BLOCK_SIZE)
    inputs = builder.build(StepPlan((second.new,), (second.step([5]),)), unused)
    assert inputs.forward.attention.inputs.slot_mapping_T.tolist() == [8 * BLOCK_SIZE]
    with pytest.raises(AssertionError, match="epochs"):
        builder.build(StepPlan((), (first.step([1]),)), unused)


def test_ranks_build_only_what_they_need() -> None:
    builder = builder_with(Role(is_first=False, is_last=True, is_output=False))
    one = request(0, first_block=1)
    builder.build(StepPlan((one.new,), (one.step([1, 2]),)), unused)
    inputs = builder.build(StepPlan((), (one.step(),)), unused)
    assert inputs.forward.token_ids_T is None
    assert inputs.sampling is None
    assert inputs.sample_rows_S is None, "every row draws"


def test_sampling_parameters_follow_the_slots() -> None:
    builder = builder_with()
    params = SlotParams(0.5, 7, 0.9, 0.1, 2**63 - 1, 3, 4)
    requests = [request(0, 1), request(3, 2, params)]
    plan = StepPlan(
        tuple(r.new for r in requests),
        (requests[0].step([1], sample=False), requests[1].step([2])),
    )
    sampling = builder.build(plan, unused).sampling
    assert sampling.rows.epochs.tolist() == [1]
    (row,) = sampling.rows.params.tolist()
    assert row == pytest.approx((0.5, 7, 0.9, 0.1, 2**63 - 1, 3, 4))


GROUPS = {
    "the same rows": [(0, 1, 2)] * 14,
    "rows that come and go": [(0, 1), (0, 1), (0, 1, 2), (1, 2), (0, 1, 2), (0, 1), (0, 1)] * 2,
    "rows in another order": [(0, 1), (1, 0), (0, 1), (2, 0, 1)] * 3,
    "turns": [(0,), (1, 2)] * 8,
    "turns of rows that move": [(0,), (1, 2), (0, 1), (2,), (0,), (1, 2), (1, 2), (0,)],
}


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_decode_steps_that_follow_each_other(
    groups: list[tuple[int, ...]], num_microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever rows a step shares with those before it, it has their own tokens and blocks."""
    monkeypatch.setattr(decode_rows, "ROOM", 2)
    builder = builder_with(num_microbatches=num_microbatches)
    requests = [request(slot, first_block=1 + 10 * slot) for slot in range(3)]
    lengths = [3, 4, 6]
    prompts = tuple(r.step(range(n)) for r, n in zip(requests, lengths, strict=True))
    builder.build(StepPlan(tuple(r.new for r in requests), prompts), unused)
    for number, group in enumerate(groups):
        is_prev = {slot: (number + slot) % 3 > 0 for slot in group}
        steps = [requests[slot].step([PREV if is_prev[slot] else 70 + slot]) for slot in group]
        inputs = builder.build(StepPlan((), tuple(steps)), ids_of(50, 51, 52, 53))
        paged = inputs.forward.attention.inputs
        starts = [lengths[slot] for slot in group]
        for slot in group:
            lengths[slot] += 1
        tables = [range(1 + 10 * slot, 11 + 10 * slot) for slot in group]
        assert inputs.forward.token_ids_T.tolist() == [
            (50 if is_prev[slot] else 70) + slot for slot in group
        ]
        assert inputs.forward.positions_T.tolist() == starts
        assert paged.slot_mapping_T.tolist() == [
            table[start // BLOCK_SIZE] * BLOCK_SIZE + start % BLOCK_SIZE
            for table, start in zip(tables, starts, strict=True)
        ]
        assert list(paged.context_lens) == [start + 1 for start in starts]
        assert paged.context_lens_R.tolist() == list(paged.context_lens)
        for row, (table, start) in enumerate(zip(tables, starts, strict=True)):
            num_blocks = start // BLOCK_SIZE + 1
            assert paged.block_table_RB[row, :num_blocks].tolist() == list(table[:num_blocks])
        assert inputs.sampled_slots_S.tolist() == list(group)
        assert inputs.sampling.rows.slots.tolist() == list(group)
        assert inputs.sampling.positions.tolist() == list(paged.context_lens)


def test_a_slot_that_changes_its_tenant_between_decodes() -> None:
    builder = builder_with()
    first = request(0, 1, SlotParams(0.5, 0, 1.0, 0.0, 1, 0, None))
    builder.build(StepPlan((first.new,), (first.step([3]),)), unused)
    builder.build(StepPlan((), (first.step(),)), ids_of(9, 0, 0, 0))
    second = ScriptedRequest(0, 2, GREEDY, 7, BLOCK_SIZE)
    inputs = builder.build(StepPlan((second.new,), (second.step([4]),)), unused)
    assert inputs.forward.positions_T.tolist() == [0]
    assert inputs.forward.attention.inputs.block_table_RB[0, 0] == 7
    assert inputs.sampling.rows.keys == [(0, 2)]
    assert not len(inputs.sampling.rows.drawing)
