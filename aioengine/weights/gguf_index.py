"""GGUFIndex: a llama-architecture GGUF file read as if it were a Hugging Face checkpoint."""

import re
from collections.abc import KeysView
from pathlib import Path
from typing import Final

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

from aioengine.checkpoint.gguf_file import GGUFTensor
from aioengine.checkpoint.gguf_metadata import model_config_from_gguf
from aioengine.checkpoint.gguf_model import GGUFModel
from aioengine.errors import StartupError
from aioengine.layers.quantized_format import GROUP, Format, Groups
from aioengine.weights.gguf_blocks import unpack_rows
from aioengine.weights.gguf_groups import formats_of, groups_of

PLAIN_DTYPES: Final = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.F64: torch.float64,
}
TOP_LEVEL: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
PER_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROTARY_NAME: Final = re.compile(r"self_attn\.[qk]_proj\.")
"""Their rows are stored with the two halves of every head interleaved."""
LAYER_NAME: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GGUFIndex:
    """A WeightIndex over a GGUF model; only the rows or blocks of a slice are dequantised.

    Tensors that have no place in a Hugging Face checkpoint keep their own names.
    """

    def __init__(self, path: Path) -> None:
        self._file = GGUFModel(path)
        self._head_dim = model_config_from_gguf(self._file).head_dim
        self._tensors: dict[str, GGUFTensor] = {}
        self._interleaved: set[str] = set()
        self._readable: set[GGMLQuantizationType] = set()
        """Types of which a block was unpacked."""
        for tensor in self._file.tensors.values():
            name = _published_name(tensor.name)
            self._tensors[name] = tensor
            if ROTARY_NAME.search(name):
                self._interleaved.add(name)

    def names(self) -> KeysView[str]:
        return self._tensors.keys()

    def path(self, name: str) -> Path:
        return self._file.file(self._tensor(name).name)

    def shape(self, name: str) -> tuple[int, ...]:
        tensor = self._tensor(name)
        if tensor.type not in self._readable:
            one_block = np.zeros((1, tensor.block_bytes), np.uint8)
            self._unpack(tensor, one_block)
            self._readable.add(tensor.type)
        return tensor.shape

    def read(self, name: str, dim: int | None, start: int, stop: int) -> Tensor:
        tensor = self._tensor(name)
        assert len(tensor.shape) <= 2
        assert dim is None or dim < len(tensor.shape)
        if len(tensor.shape) == 1:
            first, last = (0, tensor.shape[0]) if dim is None else (start, stop)
            values = self._values(tensor, 0, 1, first, last)[0]
        elif dim == 1:
            values = self._values(tensor, 0, tensor.num_rows, start, stop)
        else:
            first, last = (0, tensor.num_rows) if dim is None else (start, stop)
            values = self._values(tensor, first, last, 0, tensor.shape[-1])
        return self._heads_in_halves(values) if name in self._interleaved else values

    def formats(self, name: str) -> tuple[Format, ...]:
        return formats_of(self._tensor(name).type)

    def read_groups(self, name: str, dim: int | None, start: int, stop: int) -> Groups:
        tensor = self._tensor(name)
        num_rows, num_columns = tensor.shape
        rows, columns = slice(0, num_rows), slice(0, num_columns)
        if dim == 0:
            rows = slice(start, stop)
        elif dim == 1:
            columns = slice(start, stop)
        size, num_bytes = tensor.block_size, tensor.block_bytes
        first_block, last_block = columns.start // size, -(-columns.stop // size)
        packed = self._file.packed(
            tensor, rows, slice(first_block * num_bytes, last_block * num_bytes)
        )
        first = (columns.start - first_block * size) // GROUP
        count = (columns.stop - columns.start) // GROUP
        groups = groups_of(packed, tensor.type, num_bytes).columns(first, first + count)
        if name not in self._interleaved:
            return groups
        return groups.rows(self._heads_in_halves(torch.arange(rows.stop - rows.start)))

    def _tensor(self, name: str) -> GGUFTensor:
        if name not in self._tensors:
            raise StartupError(f"{self._file.path}: tensor {name} is missing")
        return self._tensors[name]

    def _values(
        self, tensor: GGUFTensor, first_row: int, last_row: int, start: int, stop: int
    ) -> Tensor:
        """Columns start..stop of rows first_row..last_row. Dequantises whole blocks only."""
        size, num_bytes = tensor.block_size, tensor.block_bytes
        first_block, last_block = start // size, -(-stop // size)
        blocks = slice(first_block * num_bytes, last_block * num_bytes)
        packed = self._file.packed(tensor, slice(first_row, last_row), blocks)
        skipped = first_block * size
        return self._unpack(tensor, packed)[:, start - skipped : stop - skipped]

    def _unpack(self, tensor: GGUFTensor, packed: NDArray[np.uint8]) -> Tensor:
        if tensor.type in PLAIN_DTYPES:
            return torch.from_numpy(packed).view(PLAIN_DTYPES[tensor.type])
        try:
            values = unpack_rows(packed, tensor.type)
        except NotImplementedError as error:
            raise StartupError(
                f"{self._file.file(tensor.name)}: tensor {tensor.name}: {error}"
            ) from error
        return torch.from_numpy(values)

    def _heads_in_halves(self, values: Tensor) -> Tensor:
        """Per head, rows (a0, b0, a1, b1, …) become (a0, a1, …, b0, b1, …)."""
        num_heads, rest = divmod(values.shape[0], self._head_dim)
        assert rest == 0, "slices of q and k are whole heads"
        pairs = values.reshape(num_heads, self._head_dim // 2, 2, *values.shape[1:])
        return pairs.transpose(1, 2).reshape(values.shape)


def _published_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; its own where there is none."""
    if match := LAYER_NAME.fullmatch(name):
        layer, part, suffix = match.groups()
        return f"model.layers.{layer}.{PER_LAYER[part]}.{suffix}" if part in PER_LAYER else name
    part, _, suffix = name.rpartition(".")
    return f"{TOP_LEVEL[part]}.{suffix}" if part in TOP_LEVEL else name
