"""Attention on CPU by compiled kernels, in place.

Shapes: T tokens · R rows · N query heads · K kv heads · G = N / K query heads of a kv head ·
H head_dim · B blocks.
"""

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from aioengine.kernels import attention as kernels
from aioengine.kernels import attention_tiles, kv_cache
from aioengine.kernels.codegen import Kernel
from aioengine.kernels.dots import HAS_DOTS
from aioengine.kernels.team import Team
from aioengine.layers.forward_batch import LayerCache, PagedInputs

VECTOR: Final = attention_tiles.VECTOR
"""Blocks are of a multiple of so many slots."""

_ATTEND: Final = {
    torch.float32: kernels.attend_float32,
    torch.bfloat16: kernels.attend_bfloat16,
    torch.float16: kernels.attend_float16,
}
_STORE: Final = {4: kv_cache.store_4_bytes, 2: kv_cache.store_2_bytes}
"""By the bytes of an element."""
_LINE_BYTES: Final = 64
_LOG2_E: Final = 1.4426950408889634

_TILE_FIELDS: Final = kernels.TILE_BYTES // 8
_Tiles = np.ndarray[Any, np.dtype[np.int64]]
"""[·, _TILE_FIELDS]."""


def in_pairs(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether keys and values lie in pairs, for dot products."""
    return HAS_DOTS and dtype == torch.bfloat16 and head_dim % 2 == 0


def cache_shapes(
    num_blocks: int, block_size: int, num_kv: int, head_dim: int, dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of keys and values, see `kernels.attention`."""
    if in_pairs(head_dim, dtype):
        return (
            (num_blocks, num_kv, head_dim // 2, block_size, 2),
            (num_blocks, num_kv, block_size // 2, head_dim, 2),
        )
    return (num_blocks, num_kv, head_dim, block_size), (num_blocks, num_kv, block_size, head_dim)


class CpuThreads:
    """What attends on CPU: a team, and memory that grows to what steps need. Addresses hold until
    the next call."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self._scratch = np.empty(0, np.float32)
        self._lines = np.empty(0, np.float32)
        self._counters = np.empty(0, np.int64)

    def scratch(self, floats_per_thread: int) -> int:
        """Address of uninitialised float32 [threads, floats_per_thread]."""
        needed = floats_per_thread * self.team.num_threads + _LINE_BYTES // 4
        if self._scratch.size < needed:
            self._scratch = np.empty(needed, np.float32)
        return _aligned(self._scratch)

    def parts(self, num_floats: int, num_counters: int) -> tuple[int, int]:
        """Addresses of uninitialised float32 for the lines of rows that are cut into parts, and of
        int64 zeros, which kernels leave as such."""
        if self._lines.size < num_floats + _LINE_BYTES // 4:
            self._lines = np.empty(2 * num_floats + _LINE_BYTES // 4, np.float32)
        if self._counters.size < num_counters:
            self._counters = np.zeros(2 * num_counters, np.int64)
        return _aligned(self._lines), self._counters.ctypes.data

    def begin(self, inputs: PagedInputs) -> "CpuAttention":
        return CpuAttention(inputs, self)


def _aligned(floats: np.ndarray[Any, Any]) -> int:
    address: int = floats.ctypes.data
    return address + -address % _LINE_BYTES


class _Job:
    """A kernel and its record of arguments. The first fields are addresses that differ per layer;
    setting them is most of what a small job costs, hence the memoryview."""

    def __init__(self, kernel: Kernel, kind: np.dtype[Any], num_chunks: int) -> None:
        self._kernel = kernel.address
        self._record = np.zeros(1, kind)
        words: Any = self._record.view(np.int64)
        self._words = memoryview(words)
        self._args = self._record.ctypes.data
        self._num_chunks = num_chunks

    def set(self, **fields: float) -> None:
        for name, value in fields.items():
            self._record[name] = value

    def run(self, team: Team, *tensors: Tensor) -> None:
        for i, tensor in enumerate(tensors):
            self._words[i] = tensor.data_ptr()
        team.run(self._kernel, self._args, self._num_chunks)


class CpuAttention:
    """Nothing beyond a row's own tokens has an influence: what other requests left behind (NaN,
    even) is overwritten or not read."""

    def __init__(self, inputs: PagedInputs, threads: CpuThreads) -> None:
        self._inputs = inputs
        self._threads = threads
        self._store: _Job | None = None
        self._attend: _Job | None = None  # for all layers of the step, which are alike
        self._out_TNH: Tensor
        self._tiles: _Tiles

    def write_kv(self, cache: LayerCache, k_TKH: Tensor, v_TKH: Tensor) -> None:
        num_tokens, num_kv, head_dim = k_TKH.shape
        assert k_TKH.stride()[1:] == v_TKH.stride()[1:] == (head_dim, 1)
        if self._store is None:
            kernel = _STORE[k_TKH.element_size()]
            if in_pairs(head_dim, k_TKH.dtype):
                kernel = kv_cache.store_pairs
            num_chunks = -(-num_tokens // kv_cache.STORED_TOKENS)
            self._store = _Job(kernel, kv_cache.STORE, num_chunks)
            self._store.set(
                k_stride=k_TKH.stride(0),
                v_stride=v_TKH.stride(0),
                slots=self._inputs.slot_mapping_T.data_ptr(),
                num_tokens=num_tokens,
                num_kv=num_kv,
                head_dim=head_dim,
                block_size=self._inputs.block_size,
            )
        self._store.run(self._threads.team, k_TKH, v_TKH, cache.k, cache.v)

    def attend(self, cache: LayerCache, q_TNH: Tensor) -> Tensor:
        if self._attend is None:
            self._out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype)
            self._attend = self._make_job(q_TNH, cache.k.shape[1])
        self._attend.run(self._threads.team, q_TNH, cache.k, cache.v)
        return self._out_TNH

    def _make_job(self, q_TNH: Tensor, num_kv: int) -> _Job:
        num_heads, head_dim = q_TNH.shape[1:]
        assert q_TNH.stride()[1:] == (head_dim, 1)
        inputs, threads, group = self._inputs, self._threads, num_heads // num_kv
        assert inputs.block_table_RB.stride(1) == 1
        decodes, num_lines = _decode_tiles(inputs)
        self._tiles = np.concatenate((_prefill_tiles(inputs, group), decodes))
        kernel = _ATTEND[q_TNH.dtype]
        if in_pairs(head_dim, q_TNH.dtype):
            kernel = kernels.attend_pairs
        floats = kernels.scratch_floats(group, head_dim)
        lines, counters = threads.parts(
            num_lines * num_heads * kernels.line_floats(head_dim), num_lines * num_kv
        )
        job = _Job(kernel, kernels.ATTEND, len(self._tiles) * num_kv)
        job.set(
            out=self._out_TNH.data_ptr(),
            q_stride=q_TNH.stride(0),
            tables=inputs.block_table_RB.data_ptr(),
            table_stride=inputs.block_table_RB.stride(0),
            lengths=inputs.context_lens_R.data_ptr(),
            tiles=self._tiles.ctypes.data,
            num_kv=num_kv,
            group=group,
            head_dim=head_dim,
            block_size=inputs.block_size,
            scratch=threads.scratch(floats),
            scratch_floats=floats,
            lines=lines,
            counters=counters,
            scale=head_dim**-0.5 * _LOG2_E,
        )
        return job


def _decode_tiles(inputs: PagedInputs) -> tuple[_Tiles, int]:
    """Of the rows with one token, one for each part; and how many steps leave lines."""
    lengths = np.array(inputs.context_lens[: inputs.num_decodes], np.int64)
    parts = -(-lengths // kernels.PART_KEYS)
    num_tiles = int(parts.sum())
    tiles = np.zeros((num_tiles, _TILE_FIELDS), np.int64)
    row, token, back, num_tokens, first_step, lines = tiles.T
    back[:] = num_tokens[:] = 1
    lines[:] = kernels.WHOLE
    if num_tiles == len(parts):
        row[:] = token[:] = np.arange(num_tiles)
        return tiles, 0
    row[:] = token[:] = np.repeat(np.arange(len(parts)), parts)
    is_cut = parts > 1
    steps = np.where(is_cut, parts * kernels.PART_STEPS, 0)
    np.copyto(lines, (np.cumsum(steps) - steps)[row], where=is_cut[row])
    part = np.arange(num_tiles) - (np.cumsum(parts) - parts)[row]
    np.multiply(part, kernels.PART_STEPS, out=first_step)
    return tiles, int(steps.sum())


def _prefill_tiles(inputs: PagedInputs, group: int) -> _Tiles:
    """Of the rows with several tokens, those with the most work first."""
    most = kernels.tokens_of_tile(group)
    tiles = []
    first = inputs.num_decodes
    for row in range(inputs.num_decodes, len(inputs.query_lens)):
        num_tokens = inputs.query_lens[row]
        for start in range(0, num_tokens, most):
            back = num_tokens - start
            tiles.append((row, first + start, back, min(most, back), 0, kernels.WHOLE))
        first += num_tokens
    tiles.sort(key=lambda tile: tile[2] - inputs.context_lens[tile[0]])
    return np.array(tiles, np.int64).reshape(-1, _TILE_FIELDS)
