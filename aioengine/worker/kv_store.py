"""The KV cache of one rank: the tensors of its layers."""

import math
import mmap
from dataclasses import dataclass
from typing import Final

import torch

from aioengine.layers.attention import AttentionBackend
from aioengine.layers.forward_batch import LayerCache
from aioengine.layers.partition import split_heads
from aioengine.model_config import ModelConfig

MAX_VECTOR_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one rank stores for a token: its kv heads in its layers, keys and values."""

    layers: range
    """Global numbers."""
    block_size: int
    num_kv_heads: int
    """Of this rank, padding included."""
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        cfg: ModelConfig,
        layers: range,
        *,
        tp_rank: int,
        tp_size: int,
        block_size: int,
        dtype: torch.dtype,
    ) -> "KVShape":
        heads = split_heads(cfg.num_heads, cfg.num_kv_heads, tp_rank, tp_size)
        return cls(layers, block_size, heads.num_local_kv_heads, cfg.head_dim, dtype)

    @property
    def block_bytes(self) -> int:
        """One block in all layers."""
        values = self.block_size * self.num_kv_heads * self.head_dim
        return 2 * len(self.layers) * values * self.dtype.itemsize

    def allocate(
        self, num_blocks: int, device: torch.device, attention: AttentionBackend
    ) -> dict[int, LayerCache]:
        """Zeroed caches by global layer number; block 0 of the `num_blocks` is the null block."""
        k_shape, v_shape = attention.cache_shapes(
            num_blocks, self.block_size, self.num_kv_heads, self.head_dim, self.dtype
        )
        return {
            layer: LayerCache(
                _zeros(k_shape, self.dtype, device), _zeros(v_shape, self.dtype, device)
            )
            for layer in self.layers
        }


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On CPU mapped from the kernel, whose pages come when they are first written: torch.zeros
    touches gigabytes at start-up, which takes seconds, and so does calloc(3) where it hands out
    what was freed before. The pages are small, as the first huge ones of all layers would take
    0.3 s of the start. Behind the tensor there is room for kernels that read whole vectors."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    room = mmap.mmap(-1, num_bytes + MAX_VECTOR_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(room, dtype=dtype, count=math.prod(shape)).view(shape)
