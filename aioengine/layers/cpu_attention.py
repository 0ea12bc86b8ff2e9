"""Attention on CPU by compiled kernels, in place: one for rows with one token, one for the others.

Shapes: T tokens · R rows · N query heads · K kv heads · G = N / K query heads of a kv head ·
H head_dim · B blocks.
"""

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from aioengine.kernels import attention as decode
from aioengine.kernels import prefill
from aioengine.kernels.codegen import Kernel
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


class CpuThreads:
    """What attends on CPU: a team, and scratch memory that grows to what steps need."""

    def __init__(self, team: Team) -> None:
        self.team = team
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
    """Keys lie as [block, K, H, slot] and values as [block, K, slot, H]; blocks are of a multiple
    of VECTOR slots.

    Nothing beyond a row's own tokens has an influence: what other requests left behind (NaN, even)
    is overwritten or not read.
    """

    def __init__(self, inputs: PagedInputs, threads: CpuThreads) -> None:
        self._inputs = inputs
        self._threads = threads
        self._store: _Job | None = None
        self._jobs: list[_Job] | None = None
        self._out_TNH: Tensor
        self._tiles = np.empty(0, prefill.TILE)

    def write_kv(self, cache: LayerCache, k_TKH: Tensor, v_TKH: Tensor) -> None:
        num_tokens, num_kv, head_dim = k_TKH.shape
        assert k_TKH.stride()[1:] == v_TKH.stride()[1:] == (head_dim, 1)
        if self._store is None:
            num_chunks = -(-num_tokens // decode.STORED_TOKENS)
            self._store = _Job(_STORE[k_TKH.element_size()], decode.STORE, num_chunks)
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
        if self._jobs is None:  # for all layers of the step, which are alike
            self._out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype)
            self._jobs = self._make_jobs(q_TNH, cache.k.shape[1])
        for job in self._jobs:
            job.run(self._threads.team, q_TNH, cache.k, cache.v)
        return self._out_TNH

    def _make_jobs(self, q_TNH: Tensor, num_kv: int) -> list[_Job]:
        num_heads, head_dim = q_TNH.shape[1:]
        assert q_TNH.stride()[1:] == (head_dim, 1)
        assert self._inputs.block_table_RB.stride(1) == 1
        inputs, group = self._inputs, num_heads // num_kv
        longest = max(inputs.context_lens[: inputs.num_decodes], default=0)
        room = decode.scratch_room(longest, head_dim)
        floats = prefill.scratch_floats(group, head_dim)
        scratch = self._threads.scratch(max(3 * decode.MAX_HEADS * room, floats))
        self._tiles = _tiles(inputs, prefill.tokens_of_tile(group))
        jobs = []
        if inputs.num_decodes:
            job = _Job(_DECODE[q_TNH.dtype], decode.ATTEND, inputs.num_decodes * num_kv)
            job.set(lengths=inputs.context_lens_R.data_ptr(), room=room)
            jobs.append(job)
        if len(self._tiles):
            job = _Job(_PREFILL[q_TNH.dtype], prefill.JOB, len(self._tiles) * num_kv)
            job.set(tiles=self._tiles.ctypes.data, scratch_floats=floats)
            jobs.append(job)
        for job in jobs:
            job.set(
                out=self._out_TNH.data_ptr(),
                q_stride=q_TNH.stride(0),
                tables=inputs.block_table_RB.data_ptr(),
                table_stride=inputs.block_table_RB.stride(0),
                num_kv=num_kv,
                group=group,
                head_dim=head_dim,
                block_size=inputs.block_size,
                scratch=scratch,
                scale=head_dim**-0.5 * _LOG2_E,
            )
        return jobs


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
