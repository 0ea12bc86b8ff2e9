"""What one step's layers read. Built by `worker/batch.py`; layers never read a tensor on the host.

Rows are requests. Rows with one token ("decode", whatever they are to the scheduler) come first;
the tokens of a row are adjacent and in order.

Shapes: T tokens · R rows · B blocks of the longest row · N query heads · K kv heads · H head_dim.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, in the order of axes that the device's attention likes. The
    first is that of blocks; block 0 is the null block."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class PagedInputs:
    """Where the tokens of a step go in the cache, and what each row may look at."""

    slot_mapping_T: Tensor
    """int64: block id × block_size + offset of each token."""
    block_table_RB: Tensor
    """int64; unused entries are 0, the null block."""
    context_lens_R: Tensor
    """int64: tokens of each row in the cache, those of this step included."""
    query_lens: tuple[int, ...]
    """Tokens of each row in this step, on the host."""
    context_lens: tuple[int, ...]
    """`context_lens_R` on the host."""
    num_decodes: int
    """The first rows, with one token each."""
    block_size: int


class Attention(Protocol):
    """Attention of one step over the paged cache; implementations are in `layers/attention.py`."""

    def write_kv(self, cache: LayerCache, k_TKH: Tensor, v_TKH: Tensor) -> None:
        """Store the step's keys and values."""

    def attend(self, cache: LayerCache, q_TNH: Tensor) -> Tensor:
        """[T, N, H]: each token over its row's cache up to and including itself. May be overwritten
        by the next call."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step of one stage. The tensors belong to the builder and are reused by the next step."""

    token_ids_T: Tensor | None
    """int64; None on stages that do not embed."""
    positions_T: Tensor
    """int64."""
    attention: Attention
    kv_caches: Mapping[int, LayerCache]
    """By global layer number."""
