"""Which calls of a stage's layers a recorder can time."""

from collections.abc import Iterator
from typing import Any, Final

from torch import nn

from aioengine.layers.embedding import LMHead, VocabParallelEmbedding
from aioengine.layers.linear import ColumnParallelLinear, RowParallelLinear
from aioengine.layers.norm import RMSNorm
from aioengine.layers.rotary import RotaryEmbedding
from aioengine.timeline.probe import Kind, Probe

KIND_OF: Final[dict[type, Kind]] = {
    VocabParallelEmbedding: Kind.EMBED,
    ColumnParallelLinear: Kind.LINEAR,
    RowParallelLinear: Kind.LINEAR,
    RMSNorm: Kind.NORM,
    RotaryEmbedding: Kind.ROTARY,
    LMHead: Kind.LOGITS,
}
"""What a stage computes outside of these is elementwise."""


def layer_probes(stage: nn.Module) -> Iterator[Probe]:
    """Public methods of the stage's layers, whether they are modules or belong to one."""
    for module in stage.modules():
        if (kind := KIND_OF.get(type(module))) is not None:
            for name in _public_methods(type(module)):
                yield Probe(module, name, kind)
        for name, value in vars(module).items():
            if (kind := KIND_OF.get(type(value))) is not None:
                yield Probe(module, name, kind)


def _public_methods(layer: type) -> list[str]:
    return [name for name, value in vars(layer).items() if _is_public(name, value)]


def _is_public(name: str, value: Any) -> bool:
    return callable(value) and not name.startswith("_")
