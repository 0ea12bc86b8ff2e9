"""Sampled ids on their way to the first stage: who waits for which."""

from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import Tensor

from aioengine.dist.groups import GroupCoordinator
from aioengine.worker.pipeline import Feedback


@dataclass
class Arrival:
    """In place of a Transfer: it must be there when it is waited for."""

    buffer: Tensor
    ids: list[int] | None = None

    def wait(self) -> Tensor:
        assert self.ids is not None, "waits for ids that nobody asked for"
        return self.buffer.copy_(torch.tensor(self.ids))


@dataclass
class FirstStage:
    """In place of its group: rank 0 of 2, the output rank is the other."""

    rank_in_group: int = 0
    world_size: int = 2
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    arrivals: list[Arrival] = field(default_factory=list)

    def irecv(self, buffer: Tensor, source: int) -> Arrival:
        self.arrivals.append(Arrival(buffer))
        return self.arrivals[-1]


def test_a_microbatch_does_not_wait_for_another_ones_ids() -> None:
    """Else the stages of a pipeline would compute one after the other."""
    group = FirstStage()
    feedback = Feedback(cast(GroupCoordinator, group), source=1, num_slots=4, max_plans_in_flight=3)
    one, other = np.array([0, 1]), np.array([2, 3])
    for slots in (one, other):
        feedback.expect(torch.from_numpy(slots), slots)
    group.arrivals[0].ids = [10, 11]
    assert feedback.last_ids(one)[one].tolist() == [10, 11]
    feedback.expect(torch.from_numpy(one), one)
    group.arrivals[1].ids = [20, 21]
    assert feedback.last_ids(other)[other].tolist() == [20, 21]
    group.arrivals[2].ids = [12, 13]
    assert feedback.last_ids(one)[one].tolist() == [12, 13]
    assert feedback.last_ids(other)[other].tolist() == [20, 21]


def test_a_slot_with_a_new_tenant_waits_for_the_latest() -> None:
    group = FirstStage()
    feedback = Feedback(cast(GroupCoordinator, group), source=1, num_slots=4, max_plans_in_flight=3)
    slot = np.array([2])
    for ids in ([7], [8]):
        feedback.expect(torch.from_numpy(slot), slot)
        group.arrivals[-1].ids = ids
    assert feedback.last_ids(slot)[2] == 8
