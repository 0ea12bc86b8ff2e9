"""Compiled writing to the paged cache; how it lies is said in `attention`."""

from typing import Any, Final

import numpy as np
from numba import carray

from aioengine.kernels.codegen import (
    BFLOAT16,
    FLOAT32,
    PAIR,
    copy_element,
    element_bytes,
    inlined,
    kernel,
    pointer,
)
from aioengine.kernels.programs import op
from aioengine.kernels.team import run_job

STORE: Final = np.dtype(
    [
        (name, np.int64)
        for name in (
            # of a layer
            *("k_new", "v_new", "k", "v"),  # addresses
            *("k_stride", "v_stride"),  # elements from token to token
            # of a step
            *("num_chunks", "slots", "num_tokens"),  # int64 [T]
            # of the model
            *("num_kv", "head_dim", "block_size"),
        )
    ]
)
STORED_TOKENS: Final = 16
"""Of a chunk: a block's worth, as the keys of a block share cache lines."""


@inlined
def _store(item: Any, number: Any, args: int, chunk: int) -> None:
    """`item` is what lies together in keys, `number` what values are written in: other threads may
    write the other half of a pair."""
    job = carray(pointer(args), 1, STORE)[0]
    num_kv, head_dim, block_size = job.num_kv, job.head_dim, job.block_size
    size, key_bytes = element_bytes(number), element_bytes(item)
    in_item = key_bytes // size
    slots = carray(pointer(job.slots), job.num_tokens, np.int64)
    first = chunk * STORED_TOKENS
    for token in range(first, min(first + STORED_TOKENS, job.num_tokens)):
        block, slot = divmod(slots[token], block_size)
        for kv in range(num_kv):
            head = (block * num_kv + kv) * head_dim * block_size * size
            k_new = job.k_new + (token * job.k_stride + kv * head_dim) * size
            v_new = job.v_new + (token * job.v_stride + kv * head_dim) * size
            k = job.k + head + slot * key_bytes
            v = job.v + head + (slot - slot % in_item) * head_dim * size + slot % in_item * size
            for i in range(head_dim // in_item):
                copy_element(item, k_new + i * key_bytes, k + i * block_size * key_bytes)
            for i in range(head_dim):
                copy_element(number, v_new + i * size, v + i * key_bytes)


@op
def store_layer(
    control: int,
    num_helpers: int,
    kernel_address: int,
    args: int,
    k_new: int,
    v_new: int,
    k: int,
    v: int,
    k_stride: int,
    v_stride: int,
) -> None:
    """The rest of the record is of the step."""
    job = carray(pointer(args), 1, STORE)[0]
    job.k_new, job.v_new, job.k, job.v = k_new, v_new, k, v
    job.k_stride, job.v_stride = k_stride, v_stride
    run_job(control, num_helpers, kernel_address, args, job.num_chunks)


@kernel
def store_4_bytes(args: int, chunk: int, thread: int) -> None:
    """`args` is a STORE; chunk i is its i-th STORED_TOKENS new tokens."""
    _store(FLOAT32, FLOAT32, args, chunk)


@kernel
def store_2_bytes(args: int, chunk: int, thread: int) -> None:
    _store(BFLOAT16, BFLOAT16, args, chunk)


@kernel
def store_pairs(args: int, chunk: int, thread: int) -> None:
    _store(PAIR, BFLOAT16, args, chunk)
