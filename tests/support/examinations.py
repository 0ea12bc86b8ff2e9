"""Examinations in which nothing is wrong, for tests to break one thing in."""

from typing import Any

import msgspec

from aioengine.doctor.examination import Clock, Examination, Person
from aioengine.doctor.messages import Cell, Device, Facts
from aioengine.handshake_messages import Endpoint
from aioengine.layout import ParallelLayout

GIB = 2**30
NUM_CORES = 16
HEALTHY_DEVICE = Device(
    name="cpu", device_id="cpu", num_threads=2, memory_free=0, memory_total=0, matmul_ms=2.0
)


def facts(rank: int, host: str = "a", **changes: Any) -> Facts:
    """Of a rank on a healthy host; `host` decides machine, network and address."""
    number = ord(host) - ord("a") + 1
    address = f"10.0.0.{number}"
    healthy = Facts(
        rank=rank,
        world_size=4,
        local_rank=rank % 2,
        local_world_size=2,
        coords=f"dp0 pp{rank // 2} tp{rank % 2}",
        node=str(number),
        host=host,
        machine=f"machine of {host}",
        network=f"network of {host}",
        pid=1000 + rank,
        address=address,
        interface="eth0",
        interfaces=("lo", "eth0"),
        mtu=1500,
        probe=Endpoint(address, 40000 + rank),
        listen_error="",
        host_resolves_to=(address,),
        rendezvous="a",
        rendezvous_resolves_to=("10.0.0.1",),
        launcher="torchrun",
        launcher_variables=f"RANK={rank}",
        variables={"OMP_NUM_THREADS": "2"},
        aioengine="1.0",
        torch="2.13",
        python="3.12",
        memory_free=100 * GIB,
        memory_total=128 * GIB,
        shm_free=60 * GIB,
        shm_total=64 * GIB,
        shm_error="",
        open_files=2**20,
        open_files_hard=2**20,
        locked_memory=None,
        infiniband=(),
        cores=tuple(range(NUM_CORES)),
        machine_cores=NUM_CORES,
    )
    return msgspec.structs.replace(healthy, **changes)


def person(rank: int, host: str = "a", **changes: Any) -> Person:
    return Person(
        facts=facts(rank, host, **changes),
        device=HEALTHY_DEVICE,
        clock=Clock(offset_ms=0.1, error_ms=0.2),
    )


def examination(hosts: str, *, tp_size: int = 1, pp_size: int = 1) -> Examination:
    """One rank for each letter of `hosts`, all well: "aabb" is two hosts with two ranks each."""
    num_ranks = len(hosts)
    layout = ParallelLayout(
        tp_size=tp_size, pp_size=pp_size, dp_size=num_ranks // (tp_size * pp_size)
    )
    ranks = {
        rank: person(
            rank,
            host,
            world_size=num_ranks,
            local_world_size=hosts.count(host),
            coords=str(layout.coords(rank)),
        )
        for rank, host in enumerate(hosts)
    }
    pairs = [(a, b) for a in ranks for b in ranks if a != b]
    return Examination(
        world_size=num_ranks,
        sizes={
            "external_dp": 1,
            "dp": layout.dp_size,
            "pp": pp_size,
            "pcp": 1,
            "tp": tp_size,
            "dcp": 1,
        },
        limit_s=30.0,
        seconds=2.0,
        ranks=ranks,
        cells=[
            Cell(source=a, target=b, connect_us=100.0, round_trip_us=50.0 if same else 80.0)
            for a, b in pairs
            for same in [hosts[a] == hosts[b]]
        ],
        num_pairs_asked=len(pairs),
        requests_wanted=4096,
    )


def change(found: Examination, rank: int, **changes: Any) -> None:
    """Other facts for one rank."""
    found.ranks[rank].facts = msgspec.structs.replace(found.ranks[rank].facts, **changes)


def slow_down(found: Examination, round_trip_us: float, *ranks: int) -> None:
    """Every way to or from one of `ranks` that leaves its host takes this long."""
    hosts = {rank: p.facts.host for rank, p in found.ranks.items()}
    found.cells = [
        msgspec.structs.replace(cell, round_trip_us=round_trip_us)
        if {cell.source, cell.target} & set(ranks) and hosts[cell.source] != hosts[cell.target]
        else cell
        for cell in found.cells
    ]


def block(found: Examination, source: int, target: int, **failure: str) -> None:
    """One way that does not work."""
    found.cells = [
        Cell(source=source, target=target, **failure)
        if (cell.source, cell.target) == (source, target)
        else cell
        for cell in found.cells
    ]
