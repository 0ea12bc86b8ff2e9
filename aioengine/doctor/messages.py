"""What ranks tell each other during an examination; every union is closed.

Rank 0 asks (`Order`), every rank answers (`Answer`), rank 0's own included.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from aioengine.handshake_messages import Endpoint

MAX_FRAME_BYTES: Final = 2**20
"""The largest frame is a rank's facts, or the cells of one row of the TCP matrix."""
LATENCY_BYTES: Final = 2**10
LARGE_BYTES: Final = 4 * 2**20


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank knows of itself and its host before anything is measured. Sizes in bytes."""

    rank: int
    world_size: int
    """According to this rank's launcher."""
    local_rank: int
    local_world_size: int
    coords: str
    node: str
    """The launcher's name for the node."""
    host: str
    machine: str
    """Equal for processes under one kernel, whatever their containers call themselves."""
    network: str
    """Equal for processes that share their network interfaces, loopback included."""
    pid: int
    address: str
    """Where the other ranks are told to reach this one."""
    interface: str | None
    """That carries `address`; None when no interface does."""
    interfaces: tuple[str, ...]
    """Names of all there are."""
    mtu: int | None
    """Largest packet of `interface`."""
    probe: Endpoint | None
    """Where this rank answers probes; None when it cannot listen on `address`."""
    listen_error: str
    host_resolves_to: tuple[str, ...]
    """IPv4 addresses that this host finds for its own name."""
    rendezvous: str
    """Name or address of the host where the launcher lets ranks meet."""
    rendezvous_resolves_to: tuple[str, ...]
    launcher: str
    launcher_variables: str
    variables: dict[str, str]
    """That steer the network, threads and devices, as the process got them."""
    aioengine: str
    torch: str
    python: str
    memory_free: int
    """Within the limits of the process's control groups."""
    memory_total: int
    shm_free: int
    shm_total: int
    shm_error: str
    """Why no shared memory can be made in /dev/shm; empty when it can."""
    open_files: int
    """Soft limit."""
    open_files_hard: int
    locked_memory: int | None
    """Soft limit; None when there is none."""
    infiniband: tuple[str, ...]
    """Devices in /sys/class/infiniband."""
    cores: tuple[int, ...]
    """That this process may run on."""
    machine_cores: int


class Device(msgspec.Struct, frozen=True, kw_only=True, tag="device"):
    """What a rank found when it opened its device; from the device thread."""

    name: str
    device_id: str
    """Equal for two ranks of a machine only if they compute on one accelerator; "cpu" for CPU."""
    num_threads: int
    memory_free: int
    """Bytes of the accelerator; 0 for CPU, whose memory is in `Facts`."""
    memory_total: int
    matmul_ms: float
    """Best time of one product of two square matrices."""
    error: str = ""


# --- answers -------------------------------------------------------------------------------------


class Claim(msgspec.Struct, frozen=True, tag="claim"):
    """First message of a rank that has come."""

    facts: Facts
    config: bytes
    """The JSON form of its EngineConfig."""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The two middle time stamps of an exchange (RFC 5905, section 8), in ns of the wall clock."""

    number: int
    received_ns: int
    sent_ns: int
    doing: str
    """What the device thread is in."""


class Cell(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One direction between two ranks: `source` dialled `target`. Times in µs.

    `failed` says where it ended: "connect" (TCP), "proof" (of belonging to this launch), "echo",
    "load" (more than a packet), or "untried" for want of time.
    """

    source: int
    target: int
    connect_us: float | None = None
    round_trip_us: float | None = None
    """Best of several small echoes."""
    failed: str = ""
    error: str = ""


class Dialled(msgspec.Struct, frozen=True, tag="dialled"):
    cells: tuple[Cell, ...]


class StoreOpened(msgspec.Struct, frozen=True, tag="store_opened"):
    port: int
    error: str = ""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """One operation of one group through one backend, as this rank saw it (medians)."""

    group: str
    ranks: tuple[int, ...]
    operation: str
    backend: str
    latency_us: float | None
    """Of a tensor of LATENCY_BYTES; None when the backend does not take it."""
    gb_per_s: float | None
    """10⁹ bytes a second, of a tensor of LARGE_BYTES."""


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    timings: tuple[Timing, ...]
    error: str = ""


Answer = Claim | Device | Pong | Dialled | StoreOpened | Measured

# --- orders --------------------------------------------------------------------------------------


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    number: int


class Target(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    pid: int
    endpoint: Endpoint


class Dial(msgspec.Struct, frozen=True, tag="dial"):
    """Measure the way to each of these ranks."""

    targets: tuple[Target, ...]
    limit_s: Annotated[float, Meta(gt=0)]


class OpenStore(msgspec.Struct, frozen=True, tag="open_store"):
    """To the leader of a replica: serve the store on which its process groups are built."""


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """Build the process groups of this replica over the store at `endpoint` and time them."""

    endpoint: Endpoint
    limit_s: Annotated[float, Meta(gt=0)]


class Verdict(msgspec.Struct, frozen=True, tag="verdict"):
    """The end: every rank exits with this status."""

    exit_status: int


Order = Ping | Dial | OpenStore | Measure | Verdict
