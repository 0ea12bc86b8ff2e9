"""What can break in a launch, where, and what the contract then promises to everybody."""

import enum
from dataclasses import dataclass
from typing import Final

from support.sightings import Ending

from aioengine.layout import ParallelLayout

HEARTBEAT_S: Final = 5.0
CLOSED_LIMIT_S: Final = 2.0
"""For the error to reach clients when the kernel closes connections. The median is to be below
`MEDIAN_CLOSED_S`."""
MEDIAN_CLOSED_S: Final = 0.5
ORPHAN_DRAIN_S: Final = 5.0
"""What requests in flight get when the launcher is gone."""
GONE_LIMIT_S: Final = 10.0
"""For every rank of a failed replica to be gone."""


class Fault(enum.Enum):
    """Values are what the table calls them."""

    SIGKILL = "SIGKILL"
    SIGSTOP = "SIGSTOP"
    FORWARD = "exception in the forward"
    METHOD = "exception in a method"
    METHOD_COLLECTIVE = "exception in a method, others in its collective"
    EXIT = "os._exit(3)"
    DROP = "connections dropped"
    ORPHANED = "torchrun's agent killed"

    @property
    def method(self) -> str | None:
        """The method of faulty_rank.py that causes it; None for what comes from outside."""
        return {
            Fault.FORWARD: "raise_in_next_forward",
            Fault.METHOD: "raise_here",
            Fault.METHOD_COLLECTIVE: "raise_instead_of_collective",
            Fault.EXIT: "exit_now",
            Fault.DROP: "drop_connections",
        }.get(self)

    @property
    def is_of_rank(self) -> bool:
        """It hits one rank, not the launcher."""
        return self is not Fault.ORPHANED

    @property
    def ends_process(self) -> bool:
        """The victim ends, or is killed for being frozen, without a word."""
        return self in (Fault.SIGKILL, Fault.SIGSTOP, Fault.EXIT)

    @property
    def error_limit_s(self) -> float:
        """From the fault to the error at the clients."""
        match self:
            case Fault.SIGSTOP:
                return HEARTBEAT_S + 2.0
            case Fault.FORWARD | Fault.METHOD_COLLECTIVE:
                # An exception waits a second for a lost rank that explains it.
                return CLOSED_LIMIT_S + 1.0
            case Fault.ORPHANED:
                return CLOSED_LIMIT_S + ORPHAN_DRAIN_S
        return CLOSED_LIMIT_S


class Role(enum.Enum):
    FRONT = "rank 0 (front end, leader)"
    LEADER = "another leader"
    PEER = "first-stage peer"
    OUTPUT = "output rank"

    def rank(self, layout: ParallelLayout) -> int:
        """The peer is of the front end's own replica, the output rank of the other one."""
        match self:
            case Role.FRONT:
                return 0
            case Role.LEADER:
                return layout.leaders[1]
            case Role.PEER:
                return 1
            case Role.OUTPUT:
                return layout.output_rank_of(layout.leaders[1])


@dataclass(frozen=True, slots=True)
class Promise:
    """What is to be seen after a fault on a rank of a launch with two replicas."""

    failed_clients: frozenset[Ending]
    other_clients: frozenset[Ending]
    statuses: dict[int, frozenset[int | str]]
    """Exit status by rank, KILLED where nobody can tell it."""
    gone_ranks: frozenset[int]
    """Those that end within `GONE_LIMIT_S`: not a front end that serves the other replica on."""
    blamed: frozenset[int]
    """Error events and `first failure` lines name one of these ranks, if there are any."""


FINISHED: Final[frozenset[Ending]] = frozenset({"finished"})
FAILED: Final[frozenset[Ending]] = frozenset({"error"})
RESET: Final[frozenset[Ending]] = frozenset({"reset"})
KILLED: Final = "killed"
NOBODY: Final[frozenset[int]] = frozenset()


def promise(fault: Fault, victim: int, layout: ParallelLayout) -> Promise:
    """`victim` is the rank that is hit; it does not matter when the agent is."""
    everybody = frozenset(range(layout.launch_world_size))
    statuses: dict[int, frozenset[int | str]] = dict.fromkeys(everybody, frozenset({0}))
    if fault is Fault.METHOD:
        return Promise(FINISHED, FINISHED, statuses, gone_ranks=NOBODY, blamed=NOBODY)
    if fault is Fault.ORPHANED:
        drained = FINISHED | FAILED
        return Promise(drained, drained, statuses, gone_ranks=everybody, blamed=NOBODY)
    takes_front_end = victim == 0 and (fault.ends_process or fault is Fault.DROP)
    failing = everybody if takes_front_end else frozenset(layout.replica(victim))
    statuses |= dict.fromkeys(failing, frozenset({71}))
    blamed = frozenset({victim})
    match fault:
        case Fault.SIGKILL | Fault.SIGSTOP:
            statuses[victim] = frozenset({KILLED})
        case Fault.EXIT:
            statuses[victim] = frozenset({3})
        case Fault.FORWARD:
            statuses[victim] = frozenset({70})
        case Fault.DROP:
            blamed = everybody  # both ends of a cut connection blame the other
        case Fault.METHOD_COLLECTIVE:
            statuses[victim] = frozenset({70})
    failed_clients = RESET if victim == 0 and fault.ends_process else FAILED
    keeps_front_end = 0 in failing and not takes_front_end
    return Promise(
        failed_clients,
        failed_clients if takes_front_end else FINISHED,
        statuses,
        gone_ranks=failing - ({0} if keeps_front_end else NOBODY),
        blamed=blamed,
    )
