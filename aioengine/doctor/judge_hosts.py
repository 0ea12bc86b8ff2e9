"""Findings about ranks and hosts by themselves: devices, limits, addresses, versions. Pure."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from aioengine.doctor.examination import Examination, Person
from aioengine.doctor.finding import (
    Finding,
    Severity,
    by_host,
    finding,
    host_of,
    is_loopback,
    ranks_text,
    spans,
    who,
)
from aioengine.doctor.messages import Facts

K = TypeVar("K")

MIN_SHM_BYTES: Final = 64 * 2**20
"""Docker's default for /dev/shm. The engine and NCCL both keep buffers there."""
MIN_MEMORY_BYTES: Final = 2**29
"""Of host memory for each rank, before any weights."""
MIN_LOCKED_BYTES: Final = 2**30
"""InfiniBand registers its buffers as locked memory."""
SPARE_FILES: Final = 256
"""Open files of a rank beside one connection for every rank and request."""
MAX_CLOCK_OFFSET_MS: Final = 1000.0
SLOW_COMPUTE_RATIO: Final = 2.5
MIN_RANKS_TO_COMPARE: Final = 3


def judge_hosts(found: Examination) -> Iterator[Finding]:
    people = [person for _, person in sorted(found.ranks.items())]
    facts = [person.facts for person in people]
    yield from _settings(people)
    yield from _versions(facts)
    yield from _addresses(facts, [*facts, *(guest.facts for guest in found.cut_off)])
    yield from _interface_variables(facts)
    yield from _devices(people)
    yield from _cores(people)
    yield from _memory(facts)
    yield from _files(facts, found)
    yield from _clocks(people)
    yield from _slow_compute(people)


def grouped(facts: Iterable[Facts], key: Callable[[Facts], K]) -> dict[K, list[Facts]]:
    groups: dict[K, list[Facts]] = defaultdict(list)
    for one in facts:
        groups[key(one)].append(one)
    return groups


# --- what must be equal --------------------------------------------------------------------------


def _settings(people: list[Person]) -> Iterator[Finding]:
    for person in people:
        if person.differences:
            yield finding(
                "fault",
                "settings",
                [person.facts],
                f"{who(person.facts)} has other settings than rank 0 (rank 0's first): "
                f"{'; '.join(person.differences)}. Give every rank the same flags",
            )


def _versions(facts: list[Facts]) -> Iterator[Finding]:
    subjects: tuple[tuple[str, Severity, Callable[[Facts], str]], ...] = (
        ("aioengine", "fault", lambda one: one.aioengine),
        ("torch", "fault", lambda one: one.torch),
        ("Python", "warning", lambda one: one.python),
    )
    for name, severity, version in subjects:
        groups = grouped(facts, version)
        if len(groups) > 1:
            shown = "; ".join(f"{number}: {by_host(some)}" for number, some in groups.items())
            yield finding(
                severity,
                "versions",
                facts,
                f"ranks run different versions of {name} ({shown}); install the same one "
                "everywhere",
            )


# --- addresses -----------------------------------------------------------------------------------


def _addresses(facts: list[Facts], everybody: list[Facts]) -> Iterator[Finding]:
    """`everybody` includes ranks that are somewhere, but could not get to rank 0."""
    for one in facts:
        if one.listen_error:
            yield finding(
                "fault",
                "address",
                [one],
                f"{who(one)} cannot listen on its address {one.address}: {one.listen_error}. "
                "--host-ip and AIOENGINE_HOST_IP must be an address of the rank's own host",
            )
    if len({host_of(one) for one in everybody}) == 1:
        return
    on_loopback = [one for one in everybody if is_loopback(one.address)]
    for some in grouped(on_loopback, host_of).values():
        yield finding("fault", "loopback", some, _loopback_text(some))
    naming = [
        some[0]
        for some in grouped(everybody, host_of).values()
        if any(map(is_loopback, some[0].host_resolves_to)) and not is_loopback(some[0].address)
    ]
    if naming:
        yield finding(
            "warning",
            "loopback_name",
            naming,
            f"on {', '.join(f'host {one.host}' for one in naming)} the host's own name means a "
            "loopback address (/etc/hosts). aioengine does not rely on it; other programs that do "
            "will hang or fail across hosts",
        )


def _loopback_text(some: list[Facts]) -> str:
    one = some[0]
    reason = ""
    if any(map(is_loopback, one.rendezvous_resolves_to)):
        reason = (
            f"; there the rendezvous host {one.rendezvous} means "
            f"{', '.join(one.rendezvous_resolves_to)} (/etc/hosts)"
        )
    return (
        f"{by_host(some)}: on loopback ({one.address}) while other hosts take part, which cannot "
        f"reach it{reason}. Give the host's address with --host-ip or AIOENGINE_HOST_IP, or fix "
        "the name"
    )


def _interface_variables(facts: list[Facts]) -> Iterator[Finding]:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wrong: dict[object, list[Facts]] = defaultdict(list)
        for one in facts:
            if _unknown_interfaces(one, name):
                wrong[host_of(one), one.variables[name]].append(one)
        for some in wrong.values():
            one = some[0]
            yield finding(
                "fault",
                "interface",
                some,
                f"{by_host(some)}: was given {name}={one.variables[name]}, but there is no "
                f"interface {', '.join(_unknown_interfaces(one, name))} there, only "
                f"{', '.join(one.interfaces)}. Leave the variable out, and the interface of the "
                "rank's address is used",
            )


def _unknown_interfaces(one: Facts, name: str) -> list[str]:
    """NCCL takes prefixes, and a leading ^ or = changes the meaning: that is not judged."""
    wanted = [part.strip() for part in one.variables.get(name, "").split(",") if part]
    if any(part.startswith(("^", "=")) for part in wanted):
        return []
    takes_prefixes = name.startswith("NCCL")

    def is_known(part: str) -> bool:
        return part in one.interfaces or (
            takes_prefixes and any(have.startswith(part) for have in one.interfaces)
        )

    return [part for part in wanted if not is_known(part)]


# --- devices, cores, memory ----------------------------------------------------------------------


def _devices(people: list[Person]) -> Iterator[Finding]:
    seen: dict[tuple[str, str], Facts] = {}
    for person in people:
        device, one = person.device, person.facts
        if device is None:
            continue
        if device.error:
            yield finding(
                "fault", "device", [one], f"{who(one)} cannot use its device: {device.error}"
            )
        elif device.device_id != "cpu":
            other = seen.setdefault((one.machine, device.device_id), one)
            if other is not one:
                yield finding(
                    "fault",
                    "device_shared",
                    [other, one],
                    f"{who(other)} and {who(one)} are both on {device.name}; start at most one "
                    "rank per accelerator, or let the launcher give each its own "
                    "(CUDA_VISIBLE_DEVICES)",
                )


def _cores(people: list[Person]) -> Iterator[Finding]:
    for some in grouped((p.facts for p in people), lambda one: one.machine).values():
        if not (crowded := _crowded(some)):
            yield from _threads(people, some)
            continue
        yield finding(
            "warning",
            "cores",
            crowded,
            f"{by_host(crowded)}: {len(crowded)} ranks share "
            f"{_cores_text(_all_cores(crowded), crowded[0])} and take turns, which costs most in "
            "collectives. Start fewer ranks there, or bind each to cores of its own",
        )


def _crowded(some: list[Facts]) -> list[Facts]:
    """The first ranks of a machine that may run on fewer cores than they are; empty if none."""
    for cores in sorted({one.cores for one in some}):
        inside = [one for one in some if set(one.cores) <= set(cores)]
        if len(inside) > len(cores):
            return inside
    return []


def _all_cores(some: list[Facts]) -> tuple[int, ...]:
    return tuple(sorted({core for one in some for core in one.cores}))


def _threads(people: list[Person], some: list[Facts]) -> Iterator[Finding]:
    here = {one.rank for one in some}
    devices = [p.device for p in people if p.facts.rank in here and p.device is not None]
    num_threads = sum(device.num_threads for device in devices if device.device_id == "cpu")
    cores = _all_cores(some)
    if num_threads > len(cores):
        yield finding(
            "warning",
            "threads",
            some,
            f"{by_host(some)}: {num_threads} compute threads for "
            f"{_cores_text(cores, some[0])}; lower OMP_NUM_THREADS or --cpu-threads",
        )


def _cores_text(cores: tuple[int, ...], one: Facts) -> str:
    noun = "core" if len(cores) == 1 else "cores"
    return f"{len(cores)} {noun} ({spans(cores)}) of the {one.machine_cores} there"


def _memory(facts: list[Facts]) -> Iterator[Finding]:
    for some in grouped(facts, lambda one: one.machine).values():
        least = min(some, key=lambda one: one.memory_free)
        if least.memory_free < MIN_MEMORY_BYTES * len(some):
            yield finding(
                "warning",
                "memory",
                some,
                f"{by_host(some)}: {least.memory_free / 2**30:.2f} GiB of memory are free (within "
                f"the limits of its control groups) for {ranks_text(one.rank for one in some)}, "
                "before any weights",
            )
        if least_shm := min(some, key=lambda one: one.shm_free, default=None):
            yield from _shared_memory(least_shm, some)


def _shared_memory(least: Facts, some: list[Facts]) -> Iterator[Finding]:
    if least.shm_error:
        what = f"no shared memory can be made ({least.shm_error})"
    elif least.shm_free < MIN_SHM_BYTES * len(some) and len(some) > 1:
        what = (
            f"/dev/shm has {least.shm_free // 2**20} MiB free of {least.shm_total // 2**20}, for "
            f"{len(some)} ranks"
        )
    else:
        return
    yield finding(
        "warning",
        "shm",
        some,
        f"{by_host(some)}: {what}; collectives of one host fall back to slower ways, NCCL may "
        "fail. In a container raise it, for example docker run --shm-size 8g (or --ipc host)",
    )


def _files(facts: list[Facts], found: Examination) -> Iterator[Finding]:
    wanted = found.requests_wanted + found.world_size + SPARE_FILES
    front_end = [one for one in facts if one.rank == 0 and one.open_files < wanted]
    others = [one for one in facts if one.rank and one.open_files < found.world_size + SPARE_FILES]
    for some, need, why in (
        (front_end, wanted, "--max-concurrent-requests clients and the ranks"),
        (others, found.world_size + SPARE_FILES, "connections to the other ranks"),
    ):
        if some:
            yield finding(
                "warning",
                "open_files",
                some,
                f"{by_host(some)}: may open {min(one.open_files for one in some)} files, but needs "
                f"about {need} for {why}; raise it with ulimit -n (hard limit "
                f"{some[0].open_files_hard})",
            )
    tight = [
        one
        for one in facts
        if one.infiniband and one.locked_memory is not None and one.locked_memory < MIN_LOCKED_BYTES
    ]
    if tight:
        yield finding(
            "warning",
            "locked_memory",
            tight,
            f"{by_host(tight)}: there is InfiniBand, but only {tight[0].locked_memory} bytes of "
            "memory may be locked; set ulimit -l unlimited (under Slurm: PropagateResourceLimits)",
        )


# --- clocks, speed -------------------------------------------------------------------------------


def _clocks(people: list[Person]) -> Iterator[Finding]:
    for some in grouped((p.facts for p in people), lambda one: one.machine).values():
        ranks = {one.rank for one in some}
        clocks = [p.clock for p in people if p.facts.rank in ranks and p.clock is not None]
        best = min(clocks, key=lambda clock: clock.error_ms, default=None)
        if best is None or abs(best.offset_ms) - best.error_ms < MAX_CLOCK_OFFSET_MS:
            continue
        direction = "ahead of" if best.offset_ms > 0 else "behind"
        yield finding(
            "warning",
            "clock",
            some,
            f"{by_host(some)}: the clock is {abs(best.offset_ms) / 1e3:.1f} s {direction} rank 0's "
            f"(± {best.error_ms:.1f} ms), so log lines of different hosts do not line up; run NTP "
            "(chrony) everywhere",
        )


def _slow_compute(people: list[Person]) -> Iterator[Finding]:
    """Against the median of ranks with the same kind of device. Ranks that share too few cores
    slow each other: that is said already."""
    kinds: dict[str, list[tuple[float, Facts]]] = defaultdict(list)
    machines = grouped((p.facts for p in people), lambda one: one.machine)
    crowded = {one.rank for some in machines.values() for one in _crowded(some)}
    for person in people:
        device = person.device
        if device is None or device.error:
            continue
        if device.device_id != "cpu" or person.facts.rank not in crowded:
            kind = device.name.partition(" ")[2] or "cpu"
            kinds[kind].append((device.matmul_ms, person.facts))
    for timed in kinds.values():
        if len(timed) < MIN_RANKS_TO_COMPARE:
            continue
        usual = statistics.median(ms for ms, _ in timed)
        slow = [(ms, one) for ms, one in timed if ms > SLOW_COMPUTE_RATIO * usual]
        if slow:
            worst = max(ms for ms, _ in slow)
            yield finding(
                "warning",
                "slow_device",
                [one for _, one in slow],
                f"{by_host(one for _, one in slow)}: computes slowly: {worst:.1f} ms for a matrix "
                f"product that takes the median rank {usual:.1f} ms. Another job on the same "
                "device or cores, throttling, or a limit on CPU time",
            )
