"""Requests that decode together, step after step: their tensors are kept, and only advance.

Shapes: R rows, each of one token · B blocks that the table has room for.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aioengine.layers.forward_batch import PagedInputs
from aioengine.messages import PREV, SlotStep
from aioengine.worker.sampler import SamplingBatch, SamplingRows
from aioengine.worker.slot_tables import SlotTables
from aioengine.worker.staging import StagedInputs, StagedView

LastIds = Callable[[NDArray[np.int64]], Tensor]
"""int64 by slot: the latest sampled id of each of these slots, which are on the host."""
ROOM: Final = 8
"""Blocks by which the staged table is widened: not at every block that the longest row gets."""


class DecodeRows:
    """The rows of one decode step; the next step of the same slots, with the same tenants, costs a
    few vectorised operations. Lives until its staged inputs are used for anything else."""

    def __init__(
        self,
        tables: SlotTables,
        staged: StagedInputs,
        steps: Sequence[SlotStep],
        slots: tuple[int, ...],
    ) -> None:
        self.slots = slots
        num_rows = len(slots)
        self._tables = tables
        self._staged = staged
        self.host_slots = np.array(slots)
        self._epochs = tables.epochs(self.host_slots).tolist()
        self.slots_R = staged.slots_R.send(self.host_slots)
        """int64, on the device."""
        self._token_ids = staged.token_ids_T.view(num_rows)
        self._positions = staged.positions_T.view(num_rows)
        self._places = staged.slot_mapping_T.view(num_rows)
        self._lengths = staged.context_lens_R.view(num_rows)
        self._table: StagedView
        self._num_blocks = np.zeros(num_rows, np.int64)
        """Of each row, as the staged table has them."""
        self._width = 0
        self._query_lens = (1,) * num_rows
        self._sampling: SamplingRows | None = None

    @property
    def positions_T(self) -> Tensor:
        return self._positions.tensor

    def advance(self, steps: Sequence[SlotStep]) -> PagedInputs:
        """To the positions that these steps, one for each row, compute."""
        epochs = [step.epoch for step in steps]
        assert epochs == self._epochs, f"slots {self.slots} are at epochs {self._epochs}: {epochs=}"
        positions, lengths = self._positions.host, self._lengths.host
        positions[:] = [step.start for step in steps]
        np.add(positions, 1, out=lengths)
        self._places.host[:] = self._tables.cache_slots(self.host_slots, positions)
        for view in (self._positions, self._lengths, self._places):
            view.push()
        self._update_table()
        return PagedInputs(
            slot_mapping_T=self._places.tensor,
            block_table_RB=self._table.tensor,
            context_lens_R=self._lengths.tensor,
            query_lens=self._query_lens,
            context_lens=tuple(lengths.tolist()),
            num_decodes=len(self._query_lens),
            block_size=self._tables.block_size,
        )

    def token_ids(self, steps: Sequence[SlotStep], last_ids: LastIds) -> Tensor:
        """What is embedded, int64 [R]. `last_ids` is called when a step says PREV."""
        ids = [step.token_ids[0] for step in steps]
        num_prev = ids.count(PREV)
        token_ids_R = self._token_ids.tensor
        if num_prev == len(ids):
            torch.index_select(last_ids(self.host_slots), 0, self.slots_R, out=token_ids_R)
            return token_ids_R
        self._token_ids.host[:] = ids
        self._token_ids.push()
        if num_prev:
            prev = np.flatnonzero(self._token_ids.host == PREV)
            slots = self.host_slots[prev]
            prev_ids = last_ids(slots).index_select(0, self._staged.prev_slots.send(slots))
            token_ids_R.index_copy_(0, self._staged.prev_tokens.send(prev), prev_ids)
        return token_ids_R

    def sampling(self) -> SamplingBatch:
        """Of the step that `advance` made. On the output rank."""
        if self._sampling is None:
            self._sampling = SamplingRows(*self._tables.tenants(self.host_slots))
        return SamplingBatch(self._sampling, self._lengths.host)

    def _update_table(self) -> None:
        """Copy the rows that have got blocks; all of them where the table has to be wider."""
        num_blocks = self._tables.num_blocks[self.host_slots]
        grown = (num_blocks != self._num_blocks).nonzero()[0]
        if not len(grown):
            return
        self._num_blocks = num_blocks
        needed = int(num_blocks.max())
        if needed > self._width:
            self._width = min(-(-needed // ROOM) * ROOM, self._tables.max_blocks)
            self._table = self._staged.block_table_RB.view(len(self.slots), self._width)
            grown = np.arange(len(self.slots))
        rows = self._tables.block_table[self.host_slots[grown], : self._width]
        self._table.host[grown] = rows
        self._table.push()
