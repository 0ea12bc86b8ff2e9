"""Which tokens a request's prompt has and how often its output has each, as penalties need it.

Dense tables on the device, with rows only for the slots that asked.

Shapes: P rows of the tables · M rows that are looked up · V vocabulary.
"""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aioengine.worker.staging import send


class TokenCounts:
    """Counts every position of a slot's tenant once, whoever tells it: history, a plan's literal
    ids, or the rank's own draw.

    Positions come in order. One that is told again, as the literal id of a token drawn here is, is
    passed over.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._rows = np.full(num_slots, -1, np.int64)
        """By slot; -1 without a row."""
        self._free_rows: list[int] = []
        self._num_prompt = np.zeros(num_slots, np.int64)
        self._num_counted = np.zeros(num_slots, np.int64)
        """Positions of the slot's tenant that are in the tables."""
        self._prompt_PV = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._output_PV = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._true = torch.ones((), dtype=torch.bool, device=device)

    @property
    def num_rows(self) -> int:
        """Rows that memory is held for."""
        return len(self._prompt_PV)

    @property
    def is_open(self) -> bool:
        """Whether any slot is counted."""
        return len(self._free_rows) < self.num_rows

    def has(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        return self._rows[slots] >= 0

    def open(self, slot: int, num_prompt_tokens: int) -> None:
        """Begin to count for a new tenant."""
        self.close(slot)
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        self._prompt_PV[row].zero_()
        self._output_PV[row].zero_()
        self._rows[slot] = row
        self._num_prompt[slot] = num_prompt_tokens
        self._num_counted[slot] = 0

    def close(self, slot: int) -> None:
        """Nobody needs this slot's counts any more."""
        if self._rows[slot] >= 0:
            self._free_rows.append(int(self._rows[slot]))
            self._rows[slot] = -1

    def add(self, told: Iterable[tuple[int, int, tuple[int, ...]]]) -> None:
        """Tokens as (slot, position of the first, ids); of one slot in order of positions."""
        prompt: list[tuple[int, int]] = []
        output: list[tuple[int, int]] = []
        for slot, start, token_ids in told:
            row, num_counted = int(self._rows[slot]), int(self._num_counted[slot])
            if row < 0:
                continue
            assert start <= num_counted, f"slot {slot} lacks positions {num_counted} to {start - 1}"
            num_prompt = int(self._num_prompt[slot])
            for position in range(num_counted, start + len(token_ids)):
                part = prompt if position < num_prompt else output
                part.append((row, token_ids[position - start]))
            self._num_counted[slot] = max(num_counted, start + len(token_ids))
        if prompt:
            rows, ids = send(np.array(prompt), self._device).unbind(1)
            self._prompt_PV.index_put_((rows, ids), self._true)
        if output:
            rows, ids = send(np.array(output), self._device).unbind(1)
            self._count(rows, ids)

    def record(self, slots: NDArray[np.int64], positions: NDArray[np.int64], ids_M: Tensor) -> None:
        """Ids that these slots, all with rows, drew for these positions."""
        assert (self._num_counted[slots] == positions).all()
        self._num_counted[slots] = positions + 1
        self._count(send(self._rows[slots], self._device), ids_M)

    def look_up(self, slots: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """For slots with rows: prompt presence, bool [M, V], and output counts, int32 [M, V]."""
        rows_M = send(self._rows[slots], self._device)
        return self._prompt_PV.index_select(0, rows_M), self._output_PV.index_select(0, rows_M)

    def _count(self, rows_M: Tensor, ids_M: Tensor) -> None:
        ones_M = torch.ones(len(ids_M), dtype=torch.int32, device=self._device)
        self._output_PV.index_put_((rows_M, ids_M), ones_M, accumulate=True)

    def _grow(self) -> None:
        """Twice the rows, at most one for each slot."""
        num_rows = self.num_rows
        num_more = min(max(num_rows, 1), len(self._rows) - num_rows)
        assert num_more > 0
        self._prompt_PV = _with_more_rows(self._prompt_PV, num_more)
        self._output_PV = _with_more_rows(self._output_PV, num_more)
        self._free_rows += range(num_rows, num_rows + num_more)


def _with_more_rows(table_PV: Tensor, num_more: int) -> Tensor:
    return torch.cat((table_PV, table_PV.new_zeros(num_more, table_PV.shape[1])))
