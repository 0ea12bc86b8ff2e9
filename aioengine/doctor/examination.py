"""The result of an examination: facts only, no opinion. Pure data."""

import msgspec

from aioengine.doctor.messages import Cell, Device, Facts, Timing


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's wall clock against rank 0's, from the quickest of several exchanges."""

    offset_ms: float
    """Positive: this rank's clock is ahead."""
    error_ms: float
    """The offset is right within this; half of the round trip."""


class Person(msgspec.Struct, kw_only=True):
    """One process that came, and what became of it."""

    facts: Facts
    arrived_s: float = 0.0
    """After rank 0 began to wait."""
    differences: tuple[str, ...] = ()
    """Settings in which it differs from rank 0."""
    clock: Clock | None = None
    device: Device | None = None
    left: str = ""
    """Why its connection ended before the examination did."""
    silent_in: str = ""
    """The part of the examination in which the whole process stopped answering."""
    stuck_in: str = ""
    """What its device thread did not come back from, while the process still answers."""
    failed: str = ""
    """The error with which its process groups could not be built or used."""


class CutOff(msgspec.Struct, frozen=True, kw_only=True):
    """A process that reached the launcher's store but not rank 0."""

    facts: Facts
    reason: str


class Unheard(msgspec.Struct):
    """A rank that proved itself to rank 0 from this address, but whose facts never arrived."""

    address: str
    reason: str = ""
    """Why its connection ended; empty while it has not."""


class Examination(msgspec.Struct, kw_only=True):
    """What rank 0 knows at the end."""

    world_size: int
    sizes: dict[str, int]
    """Of the parallel layout."""
    limit_s: float
    """How long the ranks were waited for."""
    seconds: float = 0.0
    ranks: dict[int, Person] = {}
    """Who came first under each rank."""
    again: list[Person] = []
    """Who came under a rank that was there already."""
    strays: list[Person] = []
    """Whose launcher told it another number of ranks."""
    cut_off: list[CutOff] = []
    unheard: dict[int, Unheard] = {}
    cells: list[Cell] = []
    num_pairs_asked: int = 0
    is_sample: bool = False
    """Too many ranks for every pair to be tried."""
    timings: list[Timing] = []
    """Per group, the slowest member's."""
    unmeasured: list[str] = []
    """Replicas whose groups were not built, and why, as sentences."""
    requests_wanted: int = 0
    """`--max-concurrent-requests`: connections that the front end must be able to hold."""
    interrupted: str = ""
    """The signal that ended the examination early."""

    @property
    def missing(self) -> list[int]:
        here = self.ranks.keys() | {guest.facts.rank for guest in self.cut_off}
        return [rank for rank in range(self.world_size) if rank not in here]
