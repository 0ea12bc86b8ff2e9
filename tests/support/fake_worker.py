"""A device worker without a device: tokens follow from the token before and its position."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from aioengine.activity import Activity
from aioengine.messages import PREV, RemoteCall, Sampled, StepPlan, StepResult
from aioengine.rpc import run_method
from aioengine.timeline.probe import Kind, Probe

VOCAB_SIZE = 97
LIMIT_S = 5.0
ANSWERS: dict[str, Any] = {"open_device": "cpu", "open_store": 4321, "num_kv_blocks": 65}


def next_token(token_id: int, position: int) -> int:
    return (31 * token_id + 7 * position + 3) % VOCAB_SIZE


def expected_tokens(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(next_token(token_ids[-1], len(token_ids) - 1))
    return tuple(token_ids[len(prompt) :])


class FakeWorker:
    """Implements `engine.device.DeviceWorker`. Methods run on the device thread.

    `gate` holds steps back while it is clear; `entered` tells the loop that a step has begun.
    `on_execute` and `on_call` may raise. `operation` is what steps are shown to be in.
    """

    def __init__(self, *, is_output: bool, rank: int = 0) -> None:
        self.activity = Activity()
        self.operation: str | None = None
        self.rank = rank
        self.is_output = is_output
        self.seqs: list[int] = []
        """Of the plans executed."""
        self.calls: list[str] = []
        self.prepared: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = asyncio.Event()
        self.on_execute: Callable[[StepPlan], None] = lambda plan: None
        self.on_call: Callable[[str], None] = lambda method: None
        self._loop = asyncio.get_running_loop()
        self._slots: dict[int, tuple[int, int | None]] = {}
        """Epoch and the id sampled last, by slot."""

    def probes(self) -> list[Probe]:
        return [Probe(self, "execute", Kind.STEP), Probe(self, "prepare", Kind.POST_RECEIVE)]

    def prepare(self, seq: int, plan: StepPlan) -> None:
        self.prepared.add(seq)

    def execute(self, seq: int, plan: StepPlan) -> StepResult | None:
        assert seq in self.prepared
        with self.activity.within(f"step {seq}", seq):
            self.activity.operation = self.operation
            return self._execute(seq, plan)

    def _execute(self, seq: int, plan: StepPlan) -> StepResult | None:
        self._loop.call_soon_threadsafe(self.entered.set)
        assert self.gate.wait(LIMIT_S), "the test left its gate closed"
        self.on_execute(plan)
        self.seqs.append(seq)
        for new in plan.new_slots:
            self._slots[new.slot] = (new.epoch, None)
        sampled = []
        for step in plan.steps:
            epoch, last = self._slots[step.slot]
            assert epoch == step.epoch, f"slot {step.slot} has another tenant"
            token_id = step.token_ids[-1]
            if token_id == PREV:
                assert last is not None, "PREV without a sampled step before"
                token_id = last
            if step.sample:
                drawn = next_token(token_id, step.start + len(step.token_ids) - 1)
                self._slots[step.slot] = (epoch, drawn)
                sampled.append(Sampled(step.slot, step.epoch, (drawn,)))
        return StepResult(seq, tuple(sampled)) if self.is_output else None

    def remote(self, seq: int, call: RemoteCall) -> bytes:
        with self.activity.within(f"collective_rpc {call.method}"):
            return self._remote(call)

    def _remote(self, call: RemoteCall) -> bytes:
        assert self.gate.wait(LIMIT_S), "the test left its gate closed"
        return run_method(call, self, self.rank)

    def call(self, method: str, kwargs: dict[str, Any]) -> Any:
        self.calls.append(method)
        with self.activity.within(method):
            self.on_call(method)
        return ANSWERS.get(method)
