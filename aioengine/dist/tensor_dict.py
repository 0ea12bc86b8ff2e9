"""Dicts of tensors and plain values from one rank to others, for payloads of irregular shape.

A dict travels as at most three messages: its sizes, one block of host bytes (msgpack metadata,
then every CPU tensor), and one block of device bytes. So no tensor can be taken for another, and a
sender may write to its tensors again at once. Blocks are aligned; what arrives are views of them.
"""

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from aioengine.dist.plain_values import check_plain
from aioengine.dist.process_groups import as_bytes

ALIGNMENT: Final = 64
"""Bytes; of every tensor within its block."""
MAX_DICTS_IN_FLIGHT: Final = 8
"""Sends to one rank, whose blocks are kept; one more waits until the receiver has taken the oldest."""

_TAG: Final = 1
"""Of gloo messages; plain isend and irecv of a group use tag 0, so the two never mix."""


class TensorEntry(msgspec.Struct, frozen=True, tag="tensor"):
    """Where a tensor lies: in the host or the device block, `offset` bytes from its start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    on_device: bool
    offset: int


class ValueEntry(msgspec.Struct, frozen=True, tag="value"):
    name: str
    value: Any


Entry = TensorEntry | ValueEntry
_encode_entries: Final = msgspec.msgpack.Encoder().encode
_decode_entries: Final = msgspec.msgpack.Decoder(list[Entry]).decode


@dataclass(frozen=True, slots=True)
class PackedDict:
    """What travels. `sizes`: int64 [3], bytes of metadata, host block and device block; the host
    block, never empty, starts with the metadata."""

    sizes: Tensor
    host: Tensor
    device: Tensor

    @staticmethod
    def receiving(sizes: Tensor, device: torch.device) -> "PackedDict":
        """With room for blocks of these sizes."""
        _, num_host, num_device = sizes.tolist()
        return PackedDict(
            sizes,
            torch.empty(num_host, dtype=torch.uint8),
            torch.empty(num_device, dtype=torch.uint8, device=device),
        )


def pack(values: Mapping[str, Any], device: torch.device) -> PackedDict:
    """Copies the tensors of `values`, which are on the CPU or on `device`.

    Raises TypeError that names the key of anything else.
    """
    entries: list[Entry] = []
    blocks: dict[bool, list[tuple[int, Tensor]]] = {False: [], True: []}
    ends = {False: 0, True: 0}
    for name, value in values.items():
        if not isinstance(name, str):
            raise TypeError(f"the key {name!r} is a {type(name).__name__}, not a string")
        if not isinstance(value, Tensor):
            check_plain(name, value)
            entries.append(ValueEntry(name, value))
            continue
        _check_tensor(name, value, device)
        on_device = value.device.type != "cpu"
        data = as_bytes(value.detach().contiguous())
        offset = _aligned(ends[on_device])
        ends[on_device] = offset + len(data)
        blocks[on_device].append((offset, data))
        dtype = str(value.dtype).removeprefix("torch.")
        entries.append(TensorEntry(name, dtype, tuple(value.shape), on_device, offset))
    metadata = torch.frombuffer(bytearray(_encode_entries(entries)), dtype=torch.uint8)
    start = _aligned(len(metadata))
    host = torch.empty(start + ends[False], dtype=torch.uint8)
    host[: len(metadata)] = metadata
    on_device_block = torch.empty(ends[True], dtype=torch.uint8, device=device)
    _fill(host[start:], blocks[False])
    _fill(on_device_block, blocks[True])
    sizes = torch.tensor([len(metadata), len(host), len(on_device_block)])
    return PackedDict(sizes, host, on_device_block)


def unpack(packed: PackedDict) -> dict[str, Any]:
    """The dict, in the order of its sender's; tensors are views of the blocks."""
    num_metadata = int(packed.sizes[0])
    tensors = packed.host[_aligned(num_metadata) :]
    values: dict[str, Any] = {}
    for entry in _decode_entries(packed.host[:num_metadata].numpy().tobytes()):
        match entry:
            case ValueEntry(name, value):
                values[name] = value
            case TensorEntry(name, dtype_name, shape, on_device, offset):
                dtype = getattr(torch, dtype_name)
                assert isinstance(dtype, torch.dtype), dtype_name
                block = packed.device if on_device else tensors
                num_bytes = prod(shape) * dtype.itemsize
                values[name] = block[offset : offset + num_bytes].view(dtype).view(shape)
    return values


def broadcast_dict(
    values: Mapping[str, Any] | None,
    source: int,
    *,
    device: torch.device,
    cpu_group: dist.ProcessGroup,
    device_group: dist.ProcessGroup,
) -> dict[str, Any]:
    """The dict of the member `source`, on every other member; only `source` passes one."""
    packed = None if values is None else pack(values, device)
    assert (packed is not None) == (cpu_group.rank() == source), "the source alone has the values"
    sizes = torch.zeros(3, dtype=torch.int64) if packed is None else packed.sizes
    dist.broadcast(sizes, group=cpu_group, group_src=source)
    blocks = packed or PackedDict.receiving(sizes, device)
    dist.broadcast(blocks.host, group=cpu_group, group_src=source)
    if len(blocks.device):
        dist.broadcast(blocks.device, group=device_group, group_src=source)
    return unpack(blocks) if values is None else dict(values)


class SentDict:
    """A dict on its way out; holds the blocks and Work objects that must outlive the transfer."""

    def __init__(self, packed: PackedDict, works: list[dist.Work]) -> None:
        self._packed: PackedDict | None = packed
        self._works = works

    def wait(self) -> None:
        """Blocks until the receiver has taken the dict, which it does in its own `wait`.

        RuntimeError when the group's time-out ends or the receiver is gone.
        """
        while self._works:
            self._works[0].wait()
            del self._works[0]
        self._packed = None


class ReceivedDict:
    """A dict to come. Nothing is received before somebody waits."""

    def __init__(self, link: "TensorDictLink", source: int) -> None:
        self._link = link
        self._source = source
        self._values: dict[str, Any] | None = None

    def wait(self) -> dict[str, Any]:
        """The dict; receives those before it from the same sender first.

        RuntimeError when the group's time-out ends or the sender is gone.
        """
        while self._values is None:
            self._link.receive_next(self._source)
        return self._values

    def complete(self, values: dict[str, Any]) -> None:
        self._values = values


class TensorDictLink:
    """Dicts in flight between this member of a group and the others, in order per pair.

    Owns sends until they are done: one that is dropped may hang its receiver.
    """

    def __init__(
        self, device: torch.device, cpu_group: dist.ProcessGroup, device_group: dist.ProcessGroup
    ) -> None:
        self._device = device
        self._cpu_group = cpu_group
        self._device_group = device_group
        self._sent: dict[int, deque[SentDict]] = defaultdict(deque)
        self._awaited: dict[int, deque[ReceivedDict]] = defaultdict(deque)

    def isend(self, values: Mapping[str, Any], target: int) -> SentDict:
        packed = pack(values, self._device)
        works = [
            self._isend(packed.sizes, target, self._cpu_group),
            self._isend(packed.host, target, self._cpu_group),
        ]
        if len(packed.device):
            works.append(self._isend(packed.device, target, self._device_group))
        sent = self._sent[target]
        sent.append(SentDict(packed, works))
        if len(sent) > MAX_DICTS_IN_FLIGHT:
            sent.popleft().wait()
        return sent[-1]

    def irecv(self, source: int) -> ReceivedDict:
        self._awaited[source].append(ReceivedDict(self, source))
        return self._awaited[source][-1]

    def awaits(self, source: int) -> bool:
        """Some dict of that member has been asked for and not been received."""
        return bool(self._awaited[source])

    def receive_next(self, source: int) -> None:
        """Blocks until the oldest awaited dict of `source` is there."""
        sizes = torch.empty(3, dtype=torch.int64)
        self._irecv(sizes, source, self._cpu_group).wait()
        packed = PackedDict.receiving(sizes, self._device)
        works = [self._irecv(packed.host, source, self._cpu_group)]
        if len(packed.device):
            works.append(self._irecv(packed.device, source, self._device_group))
        for work in works:
            work.wait()
        self._awaited[source].popleft().complete(unpack(packed))

    def close(self) -> None:
        """Blocks until every dict that was sent has been taken."""
        for sent in self._sent.values():
            while sent:
                sent.popleft().wait()

    def _isend(self, block: Tensor, target: int, group: dist.ProcessGroup) -> dist.Work:
        work = dist.isend(block, group=group, group_dst=target, tag=_TAG)
        assert work is not None
        return work

    def _irecv(self, block: Tensor, source: int, group: dist.ProcessGroup) -> dist.Work:
        work = dist.irecv(block, group=group, group_src=source, tag=_TAG)
        assert work is not None
        return work


def _check_tensor(name: str, x: Tensor, device: torch.device) -> None:
    if x.device.type not in ("cpu", device.type):
        raise TypeError(f"{name}: a tensor on {x.device}, in a group on {device}")
    if x.layout != torch.strided or x.is_quantized:
        raise TypeError(f"{name}: a {x.layout} tensor of {x.dtype}; only dense ones travel")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _fill(block: Tensor, parts: list[tuple[int, Tensor]]) -> None:
    for offset, data in parts:
        block[offset : offset + len(data)] = data
