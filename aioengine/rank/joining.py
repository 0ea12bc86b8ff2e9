"""How a rank meets the others: the roster of the launch, then the links it needs."""

import asyncio
from dataclasses import dataclass, field

import msgspec

from aioengine.config import EngineConfig
from aioengine.control.bootstrap import (
    Bootstrap,
    KeyValueStore,
    Seat,
    run_in_daemon_thread,
)
from aioengine.control.channel import Link, MemoryLink
from aioengine.control.deadline import VERDICT_GRACE_S
from aioengine.dist.rendezvous import open_launcher_store
from aioengine.errors import StartupTimeoutError
from aioengine.handshake_messages import Endpoint, Member, Roster
from aioengine.limits import max_frame_bytes
from aioengine.messages import RankInfo
from aioengine.model_config import ModelConfig
from aioengine.rank.place import Place


@dataclass(slots=True)
class Links:
    """This rank's control links, by what is at the other end."""

    roster: Roster
    key: bytes
    """Of this attempt of the launch."""
    peers: dict[int, Link] = field(default_factory=dict)
    front_ends: dict[str, tuple[Link, RankInfo]] = field(default_factory=dict)
    leader: Link | None = None
    replicas: list[Link] = field(default_factory=list)
    """The front end's links to all leaders, by dp rank."""

    def close(self) -> None:
        """For a process that goes on without the engine."""
        front_ends = (link for link, _ in self.front_ends.values())
        for link in (*self.peers.values(), *front_ends, *self.replicas):
            link.close()
        if self.leader is not None:
            self.leader.close()


def front_end_name(rank: int) -> str:
    """Unique in the launch: requests carry it in their ids."""
    return f"rank{rank}"


async def join_launch(place: Place, model: ModelConfig, trace: Endpoint | None = None) -> Links:
    """Meet every rank of the launch and open this one's links. `trace` is where this rank's trace
    thread listens.

    Raises StartupError or StartupTimeoutError that names the ranks that are missing or differ.
    """
    env, config = place.env, place.config
    store = await _open_store(place) if env.world_size > 1 else None
    async with asyncio.TaskGroup() as tasks:
        bootstrap = Bootstrap(
            tasks,
            config,
            rank=place.rank,
            num_ranks=env.world_size,
            job_secret=env.job_secret,
            address=place.address,
            max_frame_bytes=_max_frame_bytes(place.config, model),
            deadline=place.startup,
        )

        def entry(endpoint: Endpoint | None) -> Member:
            encoded = msgspec.json.encode(config)
            return Member(
                info=place.info,
                node=env.node,
                endpoint=endpoint,
                config=encoded,
                trace=trace,
            )

        try:
            roster = await bootstrap.join(store, entry, _seats(place))
            return await _connect(bootstrap, place, Links(roster, bootstrap.key))
        finally:
            bootstrap.close()


def _max_frame_bytes(config: EngineConfig, model: ModelConfig) -> int:
    return max_frame_bytes(
        max_model_len=config.max_model_len or model.max_position,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_slots=config.num_slots,
        block_size=config.block_size,
    )


async def _open_store(place: Place) -> KeyValueStore:
    try:
        async with place.startup.bound(VERDICT_GRACE_S):
            return await run_in_daemon_thread(open_launcher_store, place.env, place.startup.left_s)
    except TimeoutError:
        raise StartupTimeoutError(
            f"rank {place.rank} does not get an answer from the launcher's store at "
            f"{place.env.master_addr}:{place.env.master_port} within --startup-timeout-seconds "
            f"{place.startup.limit_s:g}; rank 0 or its launcher is frozen"
        ) from None


def _seats(place: Place) -> list[Seat]:
    """Who will dial this rank, when it leads."""
    if not place.is_leader:
        return []
    peers: list[Seat] = [("peer", rank) for rank in place.peer_ranks]
    return [*peers, *(("front_end", rank) for rank in place.other_front_ends)]


async def _connect(bootstrap: Bootstrap, place: Place, links: Links) -> Links:
    """Dial the leaders that this rank talks to, and wait for those that dial it."""
    roster = links.roster
    if not place.is_leader:
        links.leader = await bootstrap.dial(roster.members[place.leader_rank], "peer")
        return links
    if place.has_front_end:
        for leader_rank in place.layout.leaders:
            if leader_rank == place.rank:
                own_end, far_end = MemoryLink.pair(asyncio.get_running_loop())
                links.replicas.append(own_end)
                links.front_ends[front_end_name(place.rank)] = (far_end, place.info)
            else:
                leader = roster.members[leader_rank]
                links.replicas.append(await bootstrap.dial(leader, "front_end"))
    for carrier in place.other_front_ends:
        connection = await bootstrap.accept("front_end", carrier)
        links.front_ends[front_end_name(carrier)] = (connection, roster.members[carrier].info)
    for peer in place.peer_ranks:
        links.peers[peer] = await bootstrap.accept("peer", peer)
    return links
