"""Fills a stage's parameters from a checkpoint, each with this rank's part only."""

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from aioengine.errors import StartupError
from aioengine.layers.partition import Shard
from aioengine.layers.quantized import PackedParameter
from aioengine.layers.quantized_format import GROUP
from aioengine.weights.index import WeightIndex

EMBEDDING: Final = "model.embed_tokens.weight"
OUTPUT_HEAD: Final = "lm_head.weight"
ROTARY_TABLE: Final = re.compile(r"rotary_emb\.|rope_freqs|attn_rot_embd")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A parameter and its name, the published tensor that fills it, and the part of that it holds.

    Without a shard it is the whole tensor.
    """

    name: str
    published: str
    parameter: Tensor
    shard: Shard | None


def match_weights(
    stage: nn.Module, index: WeightIndex, shards: Mapping[str, Shard], *, tie_word_embeddings: bool
) -> list[Wanted]:
    """What fills the parameters of `stage`, which carry the published names; in reading order.

    A tied head always takes the embedding. Raises StartupError that names tensor and file for a
    tensor that is missing or of another shape. Reads no tensor.
    """
    wanted = []
    for name, parameter in stage.named_parameters():
        published = EMBEDDING if name == OUTPUT_HEAD and tie_word_embeddings else name
        _check_shape(index, published, parameter, shards.get(name))
        wanted.append(Wanted(name, published, parameter, shards.get(name)))
    order = {name: place for place, name in enumerate(index.names())}
    return sorted(wanted, key=lambda each: order[each.published])


def load_weights(
    wanted: Sequence[Wanted],
    index: WeightIndex,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fill the parameters; values are converted to their types.

    `progress` gets bytes of parameters filled so far and in all, after each one. Raises
    StartupError that names tensor and file for a tensor that cannot be read.
    """
    total = sum(each.parameter.nbytes for each in wanted)
    done = 0
    for each in wanted:
        _fill(each.parameter, index, each.published, each.shard)
        done += each.parameter.nbytes
        if progress is not None:
            progress(done, total)


def unread_weights(index: WeightIndex, parameters: Container[str]) -> list[str]:
    """What the checkpoint holds and a model with these parameters does not use.

    Tables of the rotary embedding, which follow from the configuration, and a head beside tied
    embeddings do not count.
    """
    return [
        name
        for name in index.names()
        if name not in parameters and name != OUTPUT_HEAD and not ROTARY_TABLE.search(name)
    ]


def logical_shape(parameter: Tensor) -> tuple[int, ...]:
    """What a parameter stands for, however it is stored."""
    return parameter.shape_OI if isinstance(parameter, PackedParameter) else tuple(parameter.shape)


def _check_shape(index: WeightIndex, name: str, parameter: Tensor, shard: Shard | None) -> None:
    expected = list(logical_shape(parameter))
    if shard is not None:
        assert expected[shard.dim] == shard.local_size >= shard.stop - shard.start >= 0
        expected[shard.dim] = shard.full_size
    found = list(index.shape(name))
    if found != expected:
        raise StartupError(
            f"{index.path(name)}: tensor {name}: expected shape {expected}, found {found}"
        )


@torch.no_grad()
def _fill(parameter: Tensor, index: WeightIndex, name: str, shard: Shard | None) -> None:
    if isinstance(parameter, PackedParameter):
        _fill_packed(parameter, index, name, shard)
        return
    if shard is None:
        parameter.copy_(index.read(name, None, 0, 0))
        return
    size = shard.stop - shard.start
    if size:
        filled = parameter.narrow(shard.dim, 0, size)
        filled.copy_(index.read(name, shard.dim, shard.start, shard.stop))
    parameter.narrow(shard.dim, size, shard.local_size - size).zero_()


def _fill_packed(
    parameter: PackedParameter, index: WeightIndex, name: str, shard: Shard | None
) -> None:
    """From the stored groups where they are of the parameter's format, else from floats."""
    dim, start, stop = (None, 0, 0) if shard is None else (shard.dim, shard.start, shard.stop)
    if shard is not None and start == stop:
        parameter.zero_()
    elif parameter.format in index.formats(name) and (shard is None or cuts_between_groups(shard)):
        parameter.fill(index.read_groups(name, dim, start, stop))
    else:
        parameter.fill(index.read(name, dim, start, stop))


def cuts_between_groups(shard: Shard) -> bool:
    """Whether a rank's part consists of whole groups of inputs."""
    if shard.dim == 0:
        return True
    return shard.start % GROUP == 0 and (shard.stop % GROUP == 0 or shard.stop == shard.full_size)
