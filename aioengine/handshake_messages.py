"""What ranks say to each other until each knows all: on every connection first, and to meet."""

from typing import Literal

import msgspec

from aioengine.messages import RankInfo

Role = Literal["member", "peer", "front_end", "probe", "trace"]
"""`probe`: a connection of `aioengine doctor` that only measures. `trace`: a front end that asks a
trace thread."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First frame of the dialling side; `nonce` is fresh for each connection."""

    rank: int
    role: Role
    nonce: bytes


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The accepting side is satisfied; the connection now carries its role's messages."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    reason: str


class Endpoint(msgspec.Struct, frozen=True):
    host: str
    port: int


class Member(msgspec.Struct, frozen=True, kw_only=True, tag="member"):
    """Every rank to rank 0, once."""

    info: RankInfo
    node: str
    endpoint: Endpoint | None
    """Where a leader listens for its peers and front ends."""
    config: bytes
    """The JSON form of its EngineConfig, to be compared field by field."""
    trace: Endpoint | None = None
    """Where its trace thread listens."""


class Roster(msgspec.Struct, frozen=True, kw_only=True, tag="roster"):
    """Rank 0 to every rank, when all are there. Indexed by rank."""

    members: tuple[Member, ...]


HandshakeMessage = Hello | Challenge | Proof | Welcome | Refused | Member | Roster
