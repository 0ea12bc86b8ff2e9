"""Which matrices of a stage stay quantised, and how: what `--quantization` comes to.

| value | stored as Q8_0, Q4_0, Q4_1, Q4_K | other types of GGUF | floats |
|---|---|---|---|
| auto | kept as they are | become floats | stay floats |
| none | become floats | become floats | stay floats |
| int8, int4 | kept, unless they have more bits | quantised | quantised |

int4 leaves in 8 bits what is worth it: embedding and head, which every token meets, and the values
of attention, which are few weights and cause about half of what int4 would cost.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from aioengine.config import Quantization
from aioengine.layers.partition import Shard
from aioengine.layers.quantized_format import INT4, INT8, Format
from aioengine.weights.index import WeightIndex
from aioengine.weights.loader import EMBEDDING, OUTPUT_HEAD, Wanted, cuts_between_groups

_TARGETS: Final[Mapping[Quantization, Format]] = {"int8": INT8, "int4": INT4}


def choose_formats(
    wanted: Sequence[Wanted], index: WeightIndex, quantization: Quantization, dtype: torch.dtype
) -> dict[str, Format]:
    """Of the matrices that do not become floats, by their parameters' names, for computing in
    `dtype`. `wanted` is of a stage in floats."""
    if quantization == "none":
        return {}
    formats = {}
    for each in wanted:
        if each.parameter.dim() != 2:
            continue
        kept = stored_format(index, each.published, each.shard, dtype)
        target = _TARGETS.get(quantization)
        if target is not None and _is_worth_8_bits(each.published):
            target = INT8
        if kept is not None and (target is None or kept.bits <= target.bits):
            formats[each.name] = kept
        elif target is not None:
            formats[each.name] = target
    return formats


def _is_worth_8_bits(name: str) -> bool:
    return name in (EMBEDDING, OUTPUT_HEAD) or name.endswith(".v_proj.weight")


def stored_format(
    index: WeightIndex, name: str, shard: Shard | None, dtype: torch.dtype
) -> Format | None:
    """In which a rank's part of a tensor can be kept; None also where it is cut within groups."""
    formats = index.formats(name)
    if not formats or (shard is not None and not cuts_between_groups(shard)):
        return None
    return formats[0] if dtype == torch.float32 else formats[-1]
