"""Attention on CPU by compiled kernels, in place.

Shapes: T tokens · R rows · N query heads · K kv heads · G = N / K query heads of a kv head ·
H head_dim · B blocks.
"""

from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from aioengine.kernels import attention as kernels
from aioengine.kernels import attention_tiles, kv_cache
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


class _Job:
    """The record of a kernel's arguments. It is in the same place for all steps: `begin` fills in
    what is of the step, and a captured step that is repeated finds it there."""

    def __init__(self, kind: np.dtype[Any]) -> None:
        self._record = np.zeros(1, kind)
        self.address: int = self._record.ctypes.data

    def set(self, **fields: float) -> None:
        for name, value in fields.items():
            self._record[name] = value


class _Heads(NamedTuple):
    """Of all layers."""

    num_heads: int
    num_kv: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv


class CpuThreads:
    """What attends on CPU, one step after the other: a team, the records of its jobs, and memory
    that grows to what steps need. Addresses hold until the next call."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self.store = _Job(kv_cache.STORE)
        self.attend = _Job(kernels.ATTEND)
        self.heads: _Heads | None = None
        """As the latest layer had them."""
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


class CpuAttention:
    """Nothing beyond a row's own tokens has an influence: what other requests left behind (NaN,
    even) is overwritten or not read."""

    def __init__(self, inputs: PagedInputs, threads: CpuThreads) -> None:
        assert inputs.block_table_RB.stride(1) == 1
        self._inputs = inputs
        self._threads = threads
        self._out_TNH: Tensor | None = None
        self._tiles: _Tiles
        num_tokens = len(inputs.slot_mapping_T)
        threads.store.set(
            num_chunks=-(-num_tokens // kv_cache.STORED_TOKENS),
            slots=inputs.slot_mapping_T.data_ptr(),
            num_tokens=num_tokens,
            block_size=inputs.block_size,
        )
        if threads.heads is not None:
            self._set_job(threads.heads)

    def write_kv(self, cache: LayerCache, k_TKH: Tensor, v_TKH: Tensor) -> None:
        num_kv, head_dim = k_TKH.shape[1:]
        assert k_TKH.stride()[1:] == v_TKH.stride()[1:] == (head_dim, 1)
        kernel = _STORE[k_TKH.element_size()]
        if in_pairs(head_dim, k_TKH.dtype):
            kernel = kv_cache.store_pairs
        team, job = self._threads.team, self._threads.store
        job.set(num_kv=num_kv, head_dim=head_dim)
        team.call(
            kv_cache.store_layer,
            *team.handle,
            kernel.address,
            job.address,
            *(tensor.data_ptr() for tensor in (k_TKH, v_TKH, cache.k, cache.v)),
            k_TKH.stride(0),
            v_TKH.stride(0),
        )

    def attend(self, cache: LayerCache, q_TNH: Tensor) -> Tensor:
        num_heads, head_dim = q_TNH.shape[1:]
        assert q_TNH.stride()[1:] == (head_dim, 1)
        kernel = _ATTEND[q_TNH.dtype]
        if in_pairs(head_dim, q_TNH.dtype):
            kernel = kernels.attend_pairs
        heads = _Heads(num_heads, cache.k.shape[1], head_dim)
        team, threads = self._threads.team, self._threads
        if heads != threads.heads:
            threads.heads = heads
            self._set_job(heads)
        if self._out_TNH is None:  # for all layers of the step
            self._out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype)
        team.call(
            kernels.attend_layer,
            *team.handle,
            kernel.address,
            threads.attend.address,
            *(tensor.data_ptr() for tensor in (q_TNH, cache.k, cache.v, self._out_TNH)),
            q_TNH.stride(0),
        )
        return self._out_TNH

    def _set_job(self, heads: _Heads) -> None:
        """What all layers of the step have in common."""
        inputs, threads = self._inputs, self._threads
        decodes, num_lines = _decode_tiles(inputs)
        self._tiles = np.concatenate((_prefill_tiles(inputs, heads.group), decodes))
        floats = kernels.scratch_floats(heads.group, heads.head_dim)
        lines, counters = threads.parts(
            num_lines * heads.num_heads * kernels.line_floats(heads.head_dim),
            num_lines * heads.num_kv,
        )
        threads.attend.set(
            num_chunks=len(self._tiles) * heads.num_kv,
            tables=inputs.block_table_RB.data_ptr(),
            table_stride=inputs.block_table_RB.stride(0),
            lengths=inputs.context_lens_R.data_ptr(),
            tiles=self._tiles.ctypes.data,
            num_kv=heads.num_kv,
            group=heads.group,
            head_dim=heads.head_dim,
            block_size=inputs.block_size,
            scratch=threads.scratch(floats),
            scratch_floats=floats,
            lines=lines,
            counters=counters,
            scale=heads.head_dim**-0.5 * _LOG2_E,
        )


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
