"""What ranks of a replica hand to each other between forward passes. No metadata travels: both
sides know the shapes from the plan.

Receives are posted before they are needed, into buffers that are reused; sends are held until they
are done. Both are bounded by the number of plans in flight, which the leader bounds.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aioengine.dist.groups import GroupCoordinator, Transfer
from aioengine.timeline.probe import Kind, Probe


class _Sends:
    """Unfinished sends, at most `limit`: one more waits for the oldest, whose receiver, that many
    plans later, has posted its receive."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._transfers: deque[Transfer] = deque()

    def add(self, transfer: Transfer) -> None:
        self._transfers.append(transfer)
        while len(self._transfers) > self._limit:
            self._transfers.popleft().wait()

    def finish(self) -> None:
        while self._transfers:
            self._transfers.popleft().wait()


class StageLink:
    """Hidden states [T, D] from the stage before to this one, and from this one to the next."""

    def __init__(
        self,
        pp: GroupCoordinator,
        *,
        max_num_batched_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        max_plans_in_flight: int,
    ) -> None:
        self._pp = pp
        self.receives = pp.rank_in_group > 0
        """Not on the first stage."""
        self._buffers = torch.empty(
            (max_plans_in_flight + 1 if self.receives else 0, max_num_batched_tokens, hidden_size),
            dtype=dtype,
            device=pp.device,
        )
        self._num_posted = 0
        self._posted: deque[tuple[int, Transfer]] = deque()
        self._sends = _Sends(max_plans_in_flight)

    def prepare(self, seq: int, num_tokens: int) -> None:
        """Post the receive for a plan, in plan order; at most `max_plans_in_flight` wait."""
        if not self.receives:
            return
        assert len(self._posted) < len(self._buffers), "more plans in flight than announced"
        buffer = self._buffers[self._num_posted % len(self._buffers), :num_tokens]
        self._num_posted += 1
        self._posted.append((seq, self._pp.irecv(buffer, self._pp.rank_in_group - 1)))

    def receive(self, seq: int) -> Tensor | None:
        """The hidden states of plan `seq`, valid until the next `receive`; None on stage 0."""
        if not self.receives:
            return None
        posted_seq, transfer = self._posted.popleft()
        assert posted_seq == seq, f"receive for job {posted_seq} is next, not for {seq}"
        return transfer.wait()

    def send(self, hidden_TD: Tensor) -> None:
        """To the next stage; the tensor must not be written to any more."""
        self._sends.add(self._pp.isend(hidden_TD.contiguous(), self._pp.rank_in_group + 1))

    def probes(self) -> list[Probe]:
        if not self.receives:
            return [Probe(self, "send", Kind.SEND)]
        return [
            Probe(self, "prepare", Kind.POST_RECEIVE),
            Probe(self, "receive", Kind.RECEIVE),
            Probe(self, "send", Kind.SEND),
        ]

    def close(self) -> None:
        self._sends.finish()


@dataclass(frozen=True, slots=True)
class _Expected:
    slots: Tensor
    transfer: Transfer


class Feedback:
    """Sampled ids on their way from the output rank to the ranks that embed, which keep the latest
    id of every slot.

    The group holds exactly these ranks. Ids are received lazily, so that a stage does not wait for
    the last one before a plan needs it: while that works on one microbatch's step, whose ids are to
    come, this stage computes another's.
    """

    def __init__(
        self,
        group: GroupCoordinator,
        *,
        source: int,
        num_slots: int,
        max_plans_in_flight: int,
    ) -> None:
        self._group = group
        self._source = source
        """The output rank's place in the group."""
        self._last_ids = torch.zeros(num_slots, dtype=torch.int64, device=group.device)
        receives = group.rank_in_group != source
        self._buffers = torch.empty(
            (max_plans_in_flight + 1 if receives else 0, num_slots),
            dtype=torch.int64,
            device=group.device,
        )
        self._num_posted = 0
        self._num_received = 0
        self._awaited = np.zeros(num_slots, np.int64)
        """By slot: how many plans' ids are received when its latest is."""
        self._expected: deque[_Expected] = deque()
        self._sends = _Sends((max_plans_in_flight + 1) * group.world_size)

    def publish(self, slots_S: Tensor, ids_S: Tensor) -> None:
        """On the output rank: hand over the ids that these slots drew."""
        self._last_ids.index_copy_(0, slots_S, ids_S)
        for target in range(self._group.world_size):
            if target != self._source:
                self._sends.add(self._group.isend(ids_S, target))

    def expect(self, slots_S: Tensor, slots: NDArray[np.int64]) -> None:
        """On the other ranks, in plan order: these slots' ids are to come. `slots` are the same on
        the host."""
        if len(self._expected) == len(self._buffers):
            self._complete_oldest()
        buffer = self._buffers[self._num_posted % len(self._buffers), : len(slots_S)]
        self._num_posted += 1
        self._awaited[slots] = self._num_posted
        transfer = self._group.irecv(buffer, self._source)
        self._expected.append(_Expected(slots_S.clone(), transfer))

    def last_ids(self, slots: NDArray[np.int64]) -> Tensor:
        """int64 [num_slots]; for these slots up to date with every plan so far."""
        awaited = self._awaited[slots].max()
        while self._num_received < awaited:
            self._complete_oldest()
        return self._last_ids

    def close(self) -> None:
        while self._expected:
            self._complete_oldest()
        self._sends.finish()

    def _complete_oldest(self) -> None:
        expected = self._expected.popleft()
        self._num_received += 1
        self._last_ids.index_copy_(0, expected.slots, expected.transfer.wait())
