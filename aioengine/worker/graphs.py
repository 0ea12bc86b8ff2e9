"""Decode steps without Python: captured once for each number of rows, then repeated.

A decode step of so many rows makes the same calls every time; what differs (ids, positions,
lengths, tables) lies in memory. On CPU the calls are of compiled functions, which a Program repeats
without the interpreter (see `capture.py`). This is also the place for an accelerator's graphs,
which want the same: inputs and results that stay in their places, nothing decided on the host.

A step that cannot be captured is computed as always.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from aioengine.activity import Activity
from aioengine.dist.groups import GroupCoordinator
from aioengine.layers.forward_batch import ForwardBatch
from aioengine.layers.team import Team
from aioengine.timeline.probe import Kind, Lane, Probe, Span, SpanSource
from aioengine.timeline.recorder import Recorder
from aioengine.worker.capture import Arena, Capture

log = logging.getLogger(__name__)

MAX_ROWS: Final = 64
"""Of a captured step, which takes about 60 kB for 30 layers. In steps of more rows Python's share
is small."""

Compute = Callable[[ForwardBatch, Tensor | None], Tensor]
"""A step's result, from its batch and the hidden states of the stage before."""


class StepGraphs:
    """The captured steps of one rank. Nobody else notices: the ranks of a group make the same
    collectives whether they capture, repeat or compute."""

    def __init__(
        self,
        stage: nn.Module,
        compute: Compute,
        probes: list[Probe],
        *,
        team: Team | None,
        tp: GroupCoordinator,
        activity: Activity,
    ) -> None:
        """`compute` runs `stage` for steps in which every row decodes; `probes` are what of it can
        be timed. Without a team, the threads that compute on CPU, nothing is captured."""
        self._compute = compute
        self._probes = probes
        self._team = team
        self._tp = tp
        self._activity = activity
        self._arena = Arena() if team is not None else None
        self._graphs: dict[int, _Graph | None] = {}
        """By number of rows; None after the first step, or if it cannot be captured."""
        self._refused: set[int] = set()
        self._hooks = list(_hooks(stage))
        self.on_spans: Callable[[Iterable[Span]], None] | None = None

    def run(self, batch: ForwardBatch, hidden_TD: Tensor | None) -> Tensor:
        """`compute`'s result, which may be overwritten by the next call."""
        num_rows = len(batch.positions_T)
        graph = self._graphs.get(num_rows)
        if graph is not None:
            return graph.replay(batch, hidden_TD, self.on_spans)
        if self._team is None or num_rows > MAX_ROWS or any(self._hooks):
            return self._compute(batch, hidden_TD)
        if num_rows in self._graphs and num_rows not in self._refused:
            return self._capture(batch, hidden_TD)
        self._graphs[num_rows] = None  # a number that comes once is not worth it
        return self._compute(batch, hidden_TD)

    def forget(self) -> None:
        """Capture again: somebody may have registered a hook, or replaced what steps read."""
        self._graphs = dict.fromkeys(self._graphs)
        self._refused.clear()

    def probes(self) -> list[SpanSource]:
        return [SpanSource(self, "on_spans")]

    def _capture(self, batch: ForwardBatch, hidden_TD: Tensor | None) -> Tensor:
        assert self._team is not None
        assert self._arena is not None
        capture = Capture(self._arena, self._team, self._tp, self._activity)
        recorder = Recorder(now=lambda: capture.program.num_calls)
        inputs = _Inputs(capture, batch, hidden_TD)
        attention = [
            Probe(batch.attention, name, Kind.ATTENTION) for name in ("write_kv", "attend")
        ]
        recorder.install(Lane.DEVICE, [*self._probes, *attention])
        try:
            with capture:
                result = self._compute(inputs.batch, inputs.hidden_TD)
        finally:
            recorder.remove(Lane.DEVICE)
        num_rows = len(batch.positions_T)
        if capture.refusal:
            self._refused.add(num_rows)
            log.info("steps of %d rows are not captured: %s", num_rows, capture.refusal)
        else:
            spans = recorder.spans(Lane.DEVICE)
            self._graphs[num_rows] = _Graph(capture, inputs, result, spans, self._activity)
        return result


def _hooks(stage: nn.Module) -> Iterator[dict[int, Any]]:
    """Where torch keeps what is to be called with a module of the stage."""
    yield module_hooks._global_forward_hooks
    yield module_hooks._global_forward_pre_hooks
    for module in stage.modules():
        yield module._forward_hooks
        yield module._forward_pre_hooks


class _Inputs:
    """What a captured step reads, in its place."""

    def __init__(self, capture: Capture, batch: ForwardBatch, hidden_TD: Tensor | None) -> None:
        def placed(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else capture.empty(tensor.shape, tensor.dtype)

        positions_T = placed(batch.positions_T)
        assert positions_T is not None
        self.hidden_TD = placed(hidden_TD)
        self.batch = replace(batch, token_ids_T=placed(batch.token_ids_T), positions_T=positions_T)
        self.fill(batch, hidden_TD)

    def fill(self, batch: ForwardBatch, hidden_TD: Tensor | None) -> None:
        """The batch's attention has been told by `begin` where its inputs are."""
        self.batch.positions_T.copy_(batch.positions_T)
        if batch.token_ids_T is not None:
            assert self.batch.token_ids_T is not None
            self.batch.token_ids_T.copy_(batch.token_ids_T)
        if hidden_TD is not None:
            assert self.hidden_TD is not None
            self.hidden_TD.copy_(hidden_TD)


class _Graph:
    """One captured step; also the Progress of its repetition."""

    def __init__(
        self,
        capture: Capture,
        inputs: _Inputs,
        result: Tensor,
        spans: list[Span],
        activity: Activity,
    ) -> None:
        """`spans` count calls instead of nanoseconds."""
        self._capture: Capture | None = capture
        """Until the first repetition."""
        self._program = capture.program
        self._inputs = inputs
        self._result = result
        self._activity = activity
        self._operations = [*capture.operations, None]
        self._last_operations = list(_latest(capture.operations))
        self._kinds = [kind for kind, _, _ in spans]
        self._begins, self._ends = (np.array([span[i] for span in spans]) for i in (1, 2))
        self._times = np.zeros(self._program.num_calls + 1, np.int64)

    def replay(
        self,
        batch: ForwardBatch,
        hidden_TD: Tensor | None,
        on_spans: Callable[[Iterable[Span]], None] | None,
    ) -> Tensor:
        if self._capture is not None:
            self._capture.spoil()
            self._capture = None
        self._inputs.fill(batch, hidden_TD)
        with self._activity.follow(self):
            self._program.replay(None if on_spans is None else self._times)
        if on_spans is not None:
            begins, ends = self._times[self._begins].tolist(), self._times[self._ends].tolist()
            on_spans(zip(self._kinds, begins, ends, strict=True))
        return self._result

    @property
    def operation(self) -> str | None:
        return self._operations[self._program.position]

    @property
    def last_operation(self) -> str | None:
        return self._last_operations[self._program.position]


def _latest(operations: list[str | None]) -> Iterator[str | None]:
    """At each call, and behind the last."""
    latest = None
    for operation in operations:
        latest = operation or latest
        yield latest
    yield latest
