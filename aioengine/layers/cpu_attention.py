"""Attention on CPU by compiled kernels, in place.

Shapes: T tokens · R rows · N query heads · K kv heads · G = N / K query heads of a kv head ·
H head_dim · B blocks.
"""

from struct import Struct
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

    def __init__(self, kind: np.dtype[Any], first: str, count: int) -> None:
        """What is of a step are `count` fields, of which this is the first."""
        self._record = np.zeros(1, kind)
        self._bytes = self._record.view(np.uint8).data
        assert kind.fields is not None
        self._first = kind.fields[first][1]
        self._step = Struct(f"{count}q")
        self.address: int = self._record.ctypes.data

    def begin(self, *values: int) -> None:
        self._step.pack_into(self._bytes, self._first, *values)

    def set(self, **fields: float) -> None:
        """What is of the model."""
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
        self.store = _Job(kv_cache.STORE, "num_chunks", 3)
        self.attend = _Job(kernels.ATTEND, "num_chunks", 7)
        self.heads: _Heads | None = None
        """As the latest layer had them."""
        self._tiles: _Tiles = np.empty((0, _TILE_FIELDS), np.int64)
        self._tiles_address = 0
        self._scratch = np.empty(0, np.float32)
        self._lines = np.empty(0, np.float32)
        self._counters = np.empty(0, np.int64)
        self._num_lines = 0
        self._parts = 0, 0

    def set_heads(self, heads: _Heads, block_size: int) -> None:
        """What all steps have in common."""
        floats = kernels.scratch_floats(heads.group, heads.head_dim)
        self._scratch = np.empty(floats * self.team.num_threads + _LINE_BYTES // 4, np.float32)
        self._num_lines = 0
        self.heads = heads
        self.attend.set(
            num_kv=heads.num_kv,
            group=heads.group,
            head_dim=heads.head_dim,
            block_size=block_size,
            scratch=_aligned(self._scratch),
            scratch_floats=floats,
            scale=heads.head_dim**-0.5 * _LOG2_E,
        )

    def tiles(self, inputs: PagedInputs, group: int) -> tuple[int, int, int]:
        """Of a step: their address, how many there are, and how many steps of rows with one token
        leave lines."""
        prefills: _Tiles | None = None
        num_prefills, num_decodes = 0, inputs.num_decodes
        if num_decodes < len(inputs.query_lens):
            prefills = _prefill_tiles(inputs, group)
            num_prefills = len(prefills)
        lengths = inputs.context_lens_R.data_ptr()
        while True:
            room = len(self._tiles) - num_prefills
            decodes = self._tiles_address + num_prefills * kernels.TILE_BYTES
            found = kernels.tile_decodes(decodes, max(room, 0), lengths, num_decodes)
            num_tiles, num_lines = num_prefills + (found & 0xFFFFFFFF), found >> 32
            if num_tiles <= len(self._tiles):
                break
            self._tiles = np.empty((2 * num_tiles, _TILE_FIELDS), np.int64)
            self._tiles_address = self._tiles.ctypes.data
        if prefills is not None:
            self._tiles[:num_prefills] = prefills
        return self._tiles_address, num_tiles, num_lines

    def parts(self, num_lines: int) -> tuple[int, int]:
        """Addresses of uninitialised float32 for the lines of rows that are cut into parts, and of
        int64 zeros, which kernels leave as such."""
        if num_lines > self._num_lines:
            assert self.heads is not None
            num_heads, num_kv, head_dim = self.heads
            self._num_lines = 2 * num_lines
            num_floats = self._num_lines * num_heads * kernels.line_floats(head_dim)
            self._lines = np.empty(num_floats + _LINE_BYTES // 4, np.float32)
            self._counters = np.zeros(self._num_lines * num_kv, np.int64)
            self._parts = _aligned(self._lines), self._counters.ctypes.data
        return self._parts

    def begin(self, inputs: PagedInputs) -> "CpuAttention":
        return CpuAttention(inputs, self)


def _aligned(floats: np.ndarray[Any, Any]) -> int:
    address: int = floats.ctypes.data
    return address + -address % _LINE_BYTES


class CpuAttention:
    """Nothing beyond a row's own tokens has an influence: what other requests left behind (NaN,
    even) is overwritten or not read."""

    def __init__(self, inputs: PagedInputs, threads: CpuThreads) -> None:
        self._inputs = inputs
        self._threads = threads
        self._out_TNH: Tensor | None = None
        num_tokens = len(inputs.slot_mapping_T)
        num_chunks = -(-num_tokens // kv_cache.STORED_TOKENS)
        threads.store.begin(num_chunks, inputs.slot_mapping_T.data_ptr(), num_tokens)
        if threads.heads is not None:
            self._begin(threads.heads)

    def write_kv(self, cache: LayerCache, k_TKH: Tensor, v_TKH: Tensor) -> None:
        num_kv, head_dim = k_TKH.shape[1:]
        assert k_TKH.stride()[1:] == v_TKH.stride()[1:] == (head_dim, 1)
        kernel = _STORE[k_TKH.element_size()]
        if in_pairs(head_dim, k_TKH.dtype):
            kernel = kv_cache.store_pairs
        team, job = self._threads.team, self._threads.store
        job.set(num_kv=num_kv, head_dim=head_dim, block_size=self._inputs.block_size)
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
            threads.set_heads(heads, self._inputs.block_size)
            self._begin(heads)
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

    def _begin(self, heads: _Heads) -> None:
        """What all layers of the step have in common."""
        inputs, threads = self._inputs, self._threads
        table_stride, entry_stride = inputs.block_table_RB.stride()
        assert entry_stride == 1
        tiles, num_tiles, num_lines = threads.tiles(inputs, heads.group)
        threads.attend.begin(
            num_tiles * heads.num_kv,
            inputs.block_table_RB.data_ptr(),
            table_stride,
            inputs.context_lens_R.data_ptr(),
            tiles,
            *threads.parts(num_lines),
        )


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
