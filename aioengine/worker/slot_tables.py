"""What plans send once about a slot's tenant: epoch, block table, sampling parameters. Host memory.

Shapes: R rows of a step.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from aioengine.messages import NewSlot, SlotStep
from aioengine.worker.sampler import ROW_PARAMS, row_params


class SlotTables:
    """Indexed by slot. A new tenant starts with an empty block table."""

    def __init__(self, num_slots: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)
        self.block_table = np.zeros((num_slots, self.max_blocks), np.int64)
        """What stands behind a tenant's own blocks is of earlier ones."""
        self.num_blocks = np.zeros(num_slots, np.int64)
        self._epochs = np.full(num_slots, -1, np.int64)
        self._params = np.zeros(num_slots, ROW_PARAMS)

    def enter(self, new: NewSlot) -> None:
        self._epochs[new.slot] = new.epoch
        self.num_blocks[new.slot] = 0
        self._params[new.slot] = row_params(new.params)

    def extend(self, steps: Iterable[SlotStep]) -> None:
        """Append the blocks that a plan brings."""
        for step in steps:
            if step.new_block_ids:
                first = self.num_blocks[step.slot]
                last = first + len(step.new_block_ids)
                self.block_table[step.slot, first:last] = step.new_block_ids
                self.num_blocks[step.slot] = last

    def epochs(self, slots_R: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of the tenants. A plan for any other one is an error of ours."""
        return self._epochs[slots_R]

    def tenants(
        self, slots_R: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.void]]:
        """Slots, epochs and ROW_PARAMS records."""
        return slots_R, self._epochs[slots_R], self._params[slots_R]

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def cache_slots(
        self, slots_T: NDArray[np.int64], positions_T: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Where in the cache tokens of these slots go: block id × block_size + offset."""
        blocks_T, offsets_T = np.divmod(positions_T, self.block_size)
        places_T = self.block_table[slots_T, blocks_T]
        places_T *= self.block_size
        places_T += offsets_T
        return places_T
