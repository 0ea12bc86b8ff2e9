"""Plain Python values between the ranks of a gloo group, as msgpack. No pickle.

Plain: None, bool, int (64 bits), float, str, bytes, lists and string-keyed dicts of these. A tuple
travels and arrives as a list.
"""

from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

_SCALARS: Final = (type(None), bool, int, float, str, bytes)


def check_plain(name: str, value: object) -> None:
    """TypeError that names what is not plain: `name`, with the way into lists and dicts."""
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_plain(f"{name}[{index}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(f"{name}: the key {key!r} is a {type(key).__name__}, not a string")
            check_plain(f"{name}[{key!r}]", item)
    elif type(value) not in _SCALARS:
        raise TypeError(f"{name}: msgpack does not carry a {type(value).__name__}")
    elif type(value) is int and not -(2**63) <= value < 2**64:
        raise TypeError(f"{name}: msgpack does not carry {value}, which needs more than 64 bits")


def broadcast_value(value: object, source: int, group: dist.ProcessGroup) -> Any:
    """The plain value of the member `source`, on every member; others' are ignored."""
    payload = None
    if group.rank() == source:
        check_plain("broadcast_object", value)
        payload = _tensor(msgspec.msgpack.encode(value))
    size = torch.tensor([0 if payload is None else len(payload)])
    dist.broadcast(size, group=group, group_src=source)
    if payload is not None:
        dist.broadcast(payload, group=group, group_src=source)
        return value
    received = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(received, group=group, group_src=source)
    return msgspec.msgpack.decode(received.numpy().tobytes())


def all_gather_values(value: object, group: dist.ProcessGroup) -> list[Any]:
    """Every member's plain value, in rank order."""
    check_plain("all_gather_values", value)
    payload = _tensor(msgspec.msgpack.encode(value))
    sizes = torch.empty(group.size(), 1, dtype=torch.int64)
    dist.all_gather(list(sizes), torch.tensor([len(payload)]), group=group)
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
    padded[: len(payload)] = payload
    rows = torch.empty(group.size(), len(padded), dtype=torch.uint8)
    dist.all_gather(list(rows), padded, group=group)
    return [
        msgspec.msgpack.decode(row[: int(size)].numpy().tobytes())
        for row, size in zip(rows, sizes, strict=True)
    ]


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
