"""Replicas that serve what a router places: no request waits while it could run elsewhere."""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aioengine.frontend.router import Router
from aioengine.messages import LoadStats, ReplicaReady

NUM_SLOTS: Final = 3
PROMPTS: Final = [tuple(range(first, first + 500)) for first in (0, 1000, 2000)]
replicas = st.integers(0, 3)


@dataclass(eq=False)
class Replica:
    """Its leader, and the links to and from it."""

    is_open: bool = True
    to_come: deque[str] = field(default_factory=deque)
    left: set[str] = field(default_factory=set)
    """Of those to come: their clients have left."""
    held: list[str] = field(default_factory=list)
    reports: deque[tuple[LoadStats, int]] = field(default_factory=deque)
    num_added: int = 0

    @property
    def num_requests(self) -> int:
        return len(self.to_come) - len(self.left) + len(self.held)

    def report(self) -> None:
        num_running = min(len(self.held), NUM_SLOTS)
        num_waiting = len(self.held) - num_running
        stats = LoadStats(num_running, num_waiting, num_free_blocks=1000)
        self.reports.append((stats, self.num_added))


class RouterMachine(RuleBasedStateMachine):
    """Requests of random beginnings come and end, messages are late, replicas fail."""

    @initialize(num_replicas=st.integers(1, 4), first=replicas)
    def begin(self, num_replicas: int, first: int) -> None:
        self.router = Router(num_replicas, first)
        self.replicas = [Replica() for _ in range(num_replicas)]
        ready = ReplicaReady(
            ranks=(), num_blocks=1000, block_size=16, max_model_len=1000, num_slots=NUM_SLOTS
        )
        for index in range(num_replicas):
            self.router.open(index, ready)
        self.num_sent = 0

    def replica(self, index: int) -> Replica:
        return self.replicas[index % len(self.replicas)]

    @precondition(lambda self: any(replica.is_open for replica in self.replicas))
    @rule(prompt=st.sampled_from(PROMPTS), cut=st.integers(1, 500), n=st.integers(1, 4))
    def arrive(self, prompt: tuple[int, ...], cut: int, n: int) -> None:
        asked = self.router.prompt((*prompt[:cut], 9999), "")
        for _ in range(n):
            self.num_sent += 1
            request_id = str(self.num_sent)
            known = [self.router.candidate(i, asked) for i in range(len(self.replicas))]
            replica = self.replicas[self.router.place(request_id, asked)]
            assert replica.is_open
            if any(candidate is not None and candidate.has_room for candidate in known):
                assert replica.num_requests < NUM_SLOTS
            replica.to_come.append(request_id)

    @rule(index=replicas, count=st.integers(1, 4))
    def deliver(self, index: int, count: int) -> None:
        """The leader reads some of what was sent, and says so."""
        replica = self.replica(index)
        for _ in range(min(count, len(replica.to_come))):
            request_id = replica.to_come.popleft()
            replica.num_added += 1
            if request_id in replica.left:
                replica.left.remove(request_id)
            else:
                replica.held.append(request_id)
        replica.report()

    @rule(index=replicas, data=st.data())
    def finish(self, index: int, data: st.DataObject) -> None:
        replica = self.replica(index)
        if replica.held:
            replica.held.remove(data.draw(st.sampled_from(replica.held)))
            replica.report()

    @rule(index=replicas, data=st.data())
    def leave(self, index: int, data: st.DataObject) -> None:
        """A client gives up, perhaps before the leader has seen its request."""
        replica = self.replica(index)
        if replica.num_requests:
            here = [*replica.held, *(i for i in replica.to_come if i not in replica.left)]
            request_id = data.draw(st.sampled_from(here))
            self.router.ended(self.replicas.index(replica), request_id)
            if request_id in replica.held:
                replica.held.remove(request_id)
                replica.report()
            else:
                replica.left.add(request_id)

    @rule(index=replicas)
    def hear(self, index: int) -> None:
        replica = self.replica(index)
        if replica.is_open and replica.reports:
            self.router.reported(self.replicas.index(replica), *replica.reports.popleft())

    @rule(index=replicas)
    def fail(self, index: int) -> None:
        replica = self.replica(index)
        self.router.close(self.replicas.index(replica))
        replica.is_open = False

    @invariant()
    def what_is_known_in_the_end_is_true(self) -> None:
        for index, replica in enumerate(getattr(self, "replicas", [])):
            known = self.router.candidate(index, self.router.prompt((1,), ""))
            assert (known is not None) == replica.is_open
            if known is not None and not replica.reports:
                assert known.num_requests == replica.num_requests
                assert known.has_room == (replica.num_requests < NUM_SLOTS)


RouterMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, report_multiple_bugs=False
)
TestRouter = RouterMachine.TestCase
