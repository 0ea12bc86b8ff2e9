"""From a custom op to the first backend that accepts, and what is refused on the way."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from aioengine.activity import Activity
from aioengine.dist import backends as backends_module
from aioengine.dist import ops
from aioengine.dist.backends import GroupSite, open_backends
from aioengine.dist.communicators import Communicator, Operation
from aioengine.errors import EngineError

NAME = "tp:test"
SIZE = 4


class RecordingBackend:
    """Accepts some types; remembers what it was asked to do. Computes like a group of equal x."""

    def __init__(self, name: str, *dtypes: torch.dtype) -> None:
        self.name = name
        self.calls: list[tuple[str, int | None]] = []
        self._dtypes = dtypes

    def accepts(self, operation: Operation, x: Tensor) -> bool:
        return x.dtype in self._dtypes

    def all_reduce(self, x: Tensor) -> Tensor:
        self.calls.append(("all_reduce", None))
        return x * SIZE

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        self.calls.append(("all_gather", dim))
        return torch.cat([x] * SIZE, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        self.calls.append(("reduce_scatter", dim))
        return x.chunk(SIZE, dim)[0] * SIZE

    def broadcast(self, x: Tensor, source: int) -> None:
        self.calls.append(("broadcast", source))

    def close(self) -> None:
        self.calls.append(("close", None))


@pytest.fixture
def backends() -> Iterator[tuple[RecordingBackend, RecordingBackend]]:
    chain = (
        RecordingBackend("fast", torch.float32),
        RecordingBackend("slow", torch.float32, torch.int64),
    )
    ops.register_group(NAME, Communicator(NAME, tuple(range(SIZE)), list(chain), Activity()))
    yield chain
    ops.unregister_group(NAME)


def test_the_first_that_accepts_does_it(
    backends: tuple[RecordingBackend, RecordingBackend],
) -> None:
    fast, slow = backends
    ops.all_reduce(torch.ones(4), NAME)
    ops.all_gather(torch.ones(2, 4), -1, NAME)
    ops.reduce_scatter(torch.ones(4, 2), -2, NAME)
    assert fast.calls == [("all_reduce", None), ("all_gather", 1), ("reduce_scatter", 0)]
    assert slow.calls == []
    ops.all_reduce(torch.ones(4, dtype=torch.int64), NAME)
    assert slow.calls == [("all_reduce", None)]


@pytest.mark.usefixtures("backends")
def test_a_tensor_that_nobody_takes_is_named() -> None:
    with pytest.raises(EngineError, match=r"all_reduce: none of \['fast', 'slow'\] takes torch\.bool"):
        ops.all_reduce(torch.ones(4, dtype=torch.bool), NAME)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.usefixtures("backends")
class TestBadArguments:
    def expect(
        self, traced: bool, error: type[Exception], text: str, call: Callable[[], Tensor]
    ) -> None:
        with pytest.raises(error, match=text):
            if traced:
                with FakeTensorMode():
                    call()
            else:
                call()

    def test_unknown_group(self, traced: bool) -> None:
        text = rf"no open process group 'tp:9' in this process; open: \['{NAME}'\]"
        for call in (
            lambda: ops.all_reduce(torch.ones(4), "tp:9"),
            lambda: ops.all_gather(torch.ones(4), 0, "tp:9"),
            lambda: ops.reduce_scatter(torch.ones(4), 0, "tp:9"),
        ):
            self.expect(traced, EngineError, text, call)

    @pytest.mark.parametrize("dim", [2, -3])
    def test_absent_dimension(self, traced: bool, dim: int) -> None:
        text = rf"a tensor of shape \(4, 8\) has no dimension {dim}"
        for op in (ops.all_gather, ops.reduce_scatter):
            self.expect(traced, ValueError, text, lambda op=op: op(torch.ones(4, 8), dim, NAME))

    def test_no_dimension_at_all(self, traced: bool) -> None:
        self.expect(
            traced,
            ValueError,
            r"shape \(\) has no dimension 0",
            lambda: ops.all_gather(torch.tensor(1.0), 0, NAME),
        )

    def test_dimension_that_cannot_be_divided(self, traced: bool) -> None:
        self.expect(
            traced,
            ValueError,
            rf"dimension 1 of shape \(4, 6\) cannot be divided among the 4 ranks of group '{NAME}'",
            lambda: ops.reduce_scatter(torch.ones(4, 6), -1, NAME),
        )


@pytest.mark.usefixtures("backends")
def test_shapes_when_traced() -> None:
    with FakeTensorMode():
        x = torch.empty(4, 8)
        assert ops.all_reduce(x.t(), NAME).shape == (8, 4)
        assert ops.all_reduce(x.t(), NAME).is_contiguous()
        assert ops.all_gather(x, -1, NAME).shape == (4, 32)
        assert ops.reduce_scatter(x, -1, NAME).shape == (4, 2)


class FakeGroup:
    """Of four ranks; nothing is ever sent."""

    def size(self) -> int:
        return SIZE


@pytest.mark.parametrize(
    ("no_custom_because", "chain", "refusal"),
    [
        (None, ["fast", "gloo"], "goes without other: no such memory"),
        ("--disable-custom-all-reduce", ["gloo"], "goes without fast: --disable-custom-all-reduce"),
    ],
)
def test_the_chain_and_each_refusal_are_logged_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    no_custom_because: str | None,
    chain: list[str],
    refusal: str,
) -> None:
    custom = [
        ("other", lambda *_: "no such memory"),
        ("fast", lambda *_: RecordingBackend("fast")),
    ]
    monkeypatch.setitem(backends_module.CUSTOM_BACKENDS, "cpu", custom)
    caplog.set_level("INFO")
    group: Any = FakeGroup()
    site = GroupSite(
        name="tp:0",
        ranks=(4, 5, 6, 7),
        rank=4,
        device=torch.device("cpu"),
        node="0",
        num_local_ranks=4,
        timeout_s=1.0,
        device_group=group,
        cpu_group=group,
    )
    opened = open_backends(site, no_custom_because=no_custom_because)
    assert [backend.name for backend in opened] == chain
    assert caplog.messages.count(f"group 'tp:0' {refusal}") == 1
    assert caplog.messages[-1] == (
        f"Using {chain} all-reduce backends (in dispatch order) for group 'tp:0' "
        "[ranks 4, 5, 6, 7]"
    )
