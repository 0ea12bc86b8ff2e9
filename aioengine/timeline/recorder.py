"""Spans of one rank, written while probes are installed."""

import time
from array import array
from collections.abc import Callable, Iterable
from typing import Any, Final

from aioengine.messages import StepPlan
from aioengine.timeline.probe import KINDS, AnyProbe, Kind, Lane, Probe, Span, SpanSource
from aioengine.trace_messages import RecordedSteps, StepNote

MAX_SPANS: Final = 250_000
"""Of one lane, about 50 MB; later ones are dropped."""
ROW: Final = 4
"""Numbers of a span on the wire: index of its kind, lane, begin and end."""

now_ns = time.monotonic_ns


class Recorder:
    """Each lane is written by one thread, which also installs and removes its probes; any thread
    may read. On an accelerator the times of calls that only launch work are those of launching."""

    def __init__(
        self,
        on_step: Callable[[StepNote], None] = lambda note: None,
        max_spans: int = MAX_SPANS,
        now: Callable[[], int] = now_ns,
    ) -> None:
        """`on_step` is told of each step at its end, on the device thread."""
        self._on_step = on_step
        self._max_spans = max_spans
        self._now = now
        self._spans: dict[Lane, list[Span]] = {lane: [] for lane in Lane}
        self._steps: list[StepNote] = []
        self._replaced: dict[Lane, list[tuple[dict[str, Any], str, Any]]] = {}
        self._jobs_ended_ns = 0
        self._delivered_ns = 0

    # --- probes

    def install(self, lane: Lane, probes: Iterable[AnyProbe]) -> None:
        """Not while one of the probed calls is under way."""
        replaced = self._replaced.setdefault(lane, [])
        for probe in probes:
            attributes = vars(probe.owner)
            replaced.append((attributes, probe.name, attributes.get(probe.name, _INHERITED)))
            if isinstance(probe, SpanSource):
                attributes[probe.name] = self._taker(lane)
            else:
                attributes[probe.name] = self._timed(lane, probe, getattr(probe.owner, probe.name))

    def watch_jobs(self, device: Any) -> None:
        """Time the way of every job of a `DeviceThread`, on its loop's thread."""
        attributes = vars(device)
        self._replaced.setdefault(Lane.LOOP, []).append((attributes, "submit", _INHERITED))
        attributes["submit"] = self._with_hand_over(device.submit)

    def remove(self, lane: Lane) -> None:
        """Everything is as it was before `install`."""
        for attributes, name, original in reversed(self._replaced.pop(lane, [])):
            if original is _INHERITED:
                del attributes[name]
            else:
                attributes[name] = original

    # --- what was recorded

    @property
    def steps(self) -> tuple[StepNote, ...]:
        return tuple(self._steps)

    def spans(self, lane: Lane) -> list[Span]:
        """A span that contains others comes after them."""
        return list(self._spans[lane])

    @property
    def is_full(self) -> bool:
        return any(len(spans) >= self._max_spans for spans in self._spans.values())

    def result(self, error: str = "") -> RecordedSteps:
        """So far. A span that contains others comes after them."""
        rows = array("q")
        for lane, spans in self._spans.items():
            for kind, began_ns, ended_ns in tuple(spans):
                rows.extend((kind, lane, began_ns, ended_ns))
        return RecordedSteps(
            steps=self.steps,
            kinds=KINDS,
            spans=rows.tobytes(),
            is_cut=self.is_full,
            error=error,
        )

    # --- timed calls

    def _timed(self, lane: Lane, probe: Probe, call: Callable[..., Any]) -> Callable[..., Any]:
        if probe.kind is Kind.STEP:
            return self._timed_step(call)
        if probe.makes:
            return self._timed_maker(lane, probe, call)
        return self._timed_call(lane, probe.kind, call)

    def _taker(self, lane: Lane) -> Callable[[Iterable[Span]], None]:
        spans, room = self._spans[lane], self._max_spans

        def take(more: Iterable[Span]) -> None:
            if len(spans) < room:
                spans.extend(more)

        return take

    def _timed_call(self, lane: Lane, kind: Kind, call: Callable[..., Any]) -> Callable[..., Any]:
        spans, number, room, now = self._spans[lane], KINDS.index(kind), self._max_spans, self._now

        def timed(*args: Any, **kwargs: Any) -> Any:
            began_ns = now()
            try:
                return call(*args, **kwargs)
            finally:
                if len(spans) < room:
                    spans.append((number, began_ns, now()))

        return timed

    def _timed_maker(
        self, lane: Lane, probe: Probe, make: Callable[..., Any]
    ) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            made = make(*args, **kwargs)
            calls = {
                name: self._timed_call(lane, kind, getattr(made, name))
                for name, kind in probe.makes.items()
            }
            return _Stand(made, calls)

        return self._timed_call(lane, probe.kind, timed)

    def _timed_step(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._timed_call(Lane.DEVICE, Kind.STEP, execute)

        def step(seq: int, plan: StepPlan) -> Any:
            began_ns = now_ns()
            try:
                return timed(seq, plan)
            finally:
                note = StepNote(seq, began_ns, now_ns(), len(plan.steps), plan.num_tokens)
                if not self.is_full:
                    self._steps.append(note)
                self._on_step(note)

        return step

    def _with_hand_over(self, submit: Callable[..., None]) -> Callable[..., None]:
        def timed_submit(
            run: Callable[[], Any],
            on_done: Callable[[Any, Any], None],
            prepare: Callable[[], None] | None = None,
        ) -> None:
            submitted_ns = now_ns()
            times: list[int] = []

            def timed_run() -> Any:
                times.append(now_ns())
                try:
                    return run()
                finally:
                    times.append(now_ns())

            def timed_on_done(value: Any, error: Any) -> None:
                if len(times) == 2:  # else `prepare` has raised
                    self._note_job(submitted_ns, times[0], times[1])
                on_done(value, error)

            submit(timed_run, timed_on_done, prepare)

        return timed_submit

    def _note_job(self, submitted_ns: int, began_ns: int, ended_ns: int) -> None:
        """On the loop's thread. What a job waited for the one before is no hand-over."""
        delivered_ns = now_ns()
        ready_ns = max(submitted_ns, self._jobs_ended_ns)
        back_ns = max(ended_ns, self._delivered_ns)
        self._jobs_ended_ns, self._delivered_ns = ended_ns, delivered_ns
        for lane, kind, begin_ns, end_ns in (
            (Lane.HAND_OVER, Kind.HAND_OVER, ready_ns, began_ns),
            (Lane.HAND_BACK, Kind.HAND_BACK, back_ns, delivered_ns),
        ):
            if len(self._spans[lane]) < self._max_spans:
                self._spans[lane].append((KINDS.index(kind), begin_ns, end_ns))


_INHERITED: Final = object()
"""For an attribute that the instance itself did not have."""


class _Stand:
    """Stands for an object, some of whose methods are timed."""

    def __init__(self, target: Any, calls: dict[str, Callable[..., Any]]) -> None:
        self._target = target
        vars(self).update(calls)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def spans_of(recorded: RecordedSteps) -> list[tuple[Kind, Lane, int, int]]:
    """Kind, lane, begin and end in nanoseconds. Raises ValueError for what no recorder made."""
    rows = array("q")
    rows.frombytes(recorded.spans)
    columns = (rows[i::ROW] for i in range(ROW))
    return [
        (Kind(recorded.kinds[kind]), Lane(lane), began_ns, ended_ns)
        for kind, lane, began_ns, ended_ns in zip(*columns, strict=True)
    ]
