"""Attention on CPU by compiled kernels, in place: one for rows with one token, one for the others.

Shapes: T tokens · R rows · N query heads · K kv heads · G = N / K query heads of a kv head ·
H head_dim · B blocks.
"""

from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from aioengine.kernels import attention as decode
from aioengine.kernels import prefill
from aioengine.kernels.team import Team
from aioengine.layers.forward_batch import LayerCache, PagedInputs

VECTOR: Final = decode.VECTOR

_STORE: Final = {4: decode.store_4_bytes, 2: decode.store_2_bytes}
"""By the bytes of an element."""
_DECODE: Final = {
    torch.float32: decode.attend_float32,
    torch.bfloat16: decode.attend_bfloat16,
    torch.float16: decode.attend_float16,
}
_PREFILL: Final = {
    torch.float32: prefill.attend_float32,
    torch.bfloat16: prefill.attend_bfloat16,
    torch.float16: prefill.attend_float16,
}
"""For every type and processor. With instructions for bfloat16 torch's SDPA reaches 70 to 83
GFLOP/s a thread (Zen 5, 2,048 tokens): a fifth of what they can do and less than float32 vectors of
16 can, and its keys and values have to be gathered first. These kernels are not measured there yet.
"""
_LINE_BYTES: Final = 64
_LOG2_E: Final = 1.4426950408889634


class _Job:
    """The record of a kernel's arguments, which is in the same place for all steps: `begin` fills
    in what is of the step, and a captured step that is repeated finds it there."""

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
    dtype: torch.dtype

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv


class CpuThreads:
    """What attends on CPU, one step after the other: a team, the records of its jobs, and scratch
    memory that grows to what steps need."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self.store = _Job(decode.STORE)
        self.decode = _Job(decode.ATTEND)
        self.prefill = _Job(prefill.JOB)
        self.heads: _Heads | None = None
        """As the latest step had them."""
        self._scratch = np.empty(0, np.float32)

    def scratch(self, floats_per_thread: int) -> int:
        """Address of uninitialised float32 [threads, floats_per_thread], until the next call."""
        needed = floats_per_thread * self.team.num_threads + _LINE_BYTES // 4
        if self._scratch.size < needed:
            self._scratch = np.empty(needed, np.float32)
        address = self._scratch.ctypes.data
        return address + -address % _LINE_BYTES

    def begin(self, inputs: PagedInputs) -> "CpuAttention":
        return CpuAttention(inputs, self)


class CpuAttention:
    """Keys lie as [block, K, H, slot] and values as [block, K, slot, H]; blocks are of a multiple
    of VECTOR slots.

    Nothing beyond a row's own tokens has an influence: what other requests left behind (NaN, even)
    is overwritten or not read.
    """

    def __init__(self, inputs: PagedInputs, threads: CpuThreads) -> None:
        self._inputs = inputs
        self._threads = threads
        self._out_TNH: Tensor | None = None
        self._tiles = np.empty(0, prefill.TILE)
        assert inputs.block_table_RB.stride(1) == 1
        num_tokens = len(inputs.slot_mapping_T)
        threads.store.set(
            num_chunks=-(-num_tokens // decode.STORED_TOKENS),
            slots=inputs.slot_mapping_T.data_ptr(),
            num_tokens=num_tokens,
            block_size=inputs.block_size,
        )
        if threads.heads is not None:
            self._set_jobs(threads.heads)

    def write_kv(self, cache: LayerCache, k_TKH: Tensor, v_TKH: Tensor) -> None:
        _, num_kv, head_dim = k_TKH.shape
        assert k_TKH.stride()[1:] == v_TKH.stride()[1:] == (head_dim, 1)
        team, job = self._threads.team, self._threads.store
        job.set(num_kv=num_kv, head_dim=head_dim)
        team.call(
            decode.store_layer,
            *team.handle,
            _STORE[k_TKH.element_size()].address,
            job.address,
            k_TKH.data_ptr(),
            v_TKH.data_ptr(),
            cache.k.data_ptr(),
            cache.v.data_ptr(),
            k_TKH.stride(0),
            v_TKH.stride(0),
        )

    def attend(self, cache: LayerCache, q_TNH: Tensor) -> Tensor:
        _, num_heads, head_dim = q_TNH.shape
        assert q_TNH.stride()[1:] == (head_dim, 1)
        heads = _Heads(num_heads, cache.k.shape[1], head_dim, q_TNH.dtype)
        threads, team = self._threads, self._threads.team
        if heads != threads.heads:
            threads.heads = heads
            self._set_jobs(heads)
        if self._out_TNH is None:  # for all layers of the step
            self._out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype)
        tensors = (q_TNH, cache.k, cache.v, self._out_TNH)
        layer = (*(tensor.data_ptr() for tensor in tensors), q_TNH.stride(0))
        if self._inputs.num_decodes:
            kernel, job = _DECODE[q_TNH.dtype], threads.decode
            team.call(decode.attend_layer, *team.handle, kernel.address, job.address, *layer)
        if len(self._tiles):
            kernel, job = _PREFILL[q_TNH.dtype], threads.prefill
            job.set(**dict(zip(decode.TENSORS, layer, strict=True)))
            team.run(kernel.address, job.address, len(self._tiles) * heads.num_kv)
        return self._out_TNH

    def _set_jobs(self, heads: _Heads) -> None:
        """What all layers of the step have in common."""
        inputs, threads = self._inputs, self._threads
        longest = max(inputs.context_lens[: inputs.num_decodes], default=0)
        room = decode.scratch_room(longest, heads.head_dim)
        floats = prefill.scratch_floats(heads.group, heads.head_dim)
        self._tiles = _tiles(inputs, prefill.tokens_of_tile(heads.group))
        common = {
            "tables": inputs.block_table_RB.data_ptr(),
            "table_stride": inputs.block_table_RB.stride(0),
            "num_kv": heads.num_kv,
            "group": heads.group,
            "head_dim": heads.head_dim,
            "block_size": inputs.block_size,
            "scratch": threads.scratch(max(3 * decode.MAX_HEADS * room, floats)),
            "scale": heads.head_dim**-0.5 * _LOG2_E,
        }
        threads.decode.set(
            num_chunks=inputs.num_decodes * heads.num_kv,
            lengths=inputs.context_lens_R.data_ptr(),
            room=room,
            **common,
        )
        if len(self._tiles):
            threads.prefill.set(tiles=self._tiles.ctypes.data, scratch_floats=floats, **common)


def _tiles(inputs: PagedInputs, most: int) -> np.ndarray[Any, Any]:
    """Up to `most` tokens each of the rows with several, those with the most work first."""
    tiles = []
    first = inputs.num_decodes
    for row in range(inputs.num_decodes, len(inputs.query_lens)):
        num_tokens, length = inputs.query_lens[row], inputs.context_lens[row]
        for start in range(0, num_tokens, most):
            position = length - num_tokens + start
            tiles.append((row, first + start, position, min(most, num_tokens - start)))
        first += num_tokens
    tiles.sort(key=lambda tile: -tile[2])
    return np.array(tiles, prefill.TILE)
