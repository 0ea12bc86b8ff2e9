"""What a rank's place in the launch makes of it: its watch, its engine, its front end."""

from collections.abc import Callable

from aioengine.checkpoint.source import ModelSource
from aioengine.control.watch import Watch
from aioengine.engine.device import DeviceThread
from aioengine.engine.leader import Leader
from aioengine.engine.peer import Peer
from aioengine.frontend.front_end import FrontEnd
from aioengine.messages import RankInfo
from aioengine.model_config import ModelConfig
from aioengine.rank.joining import Links, front_end_name
from aioengine.rank.place import Place
from aioengine.worker.runner import Worker


def new_watch(place: Place, links: Links) -> Watch:
    """A leader watches its peers, a peer its leader."""
    watched = links.peers if links.leader is None else [place.leader_rank]
    return Watch(
        place.info,
        {rank: links.roster.members[rank].info for rank in watched},
        heartbeat_seconds=place.config.heartbeat_seconds,
        kill_frozen=place.config.kill_frozen,
    )


def new_worker(place: Place, model: ModelConfig, source: ModelSource) -> Worker:
    return Worker(
        config=place.config,
        layout=place.layout,
        rank=place.rank,
        local_rank=place.env.local_rank,
        local_world_size=place.env.local_world_size,
        omp_num_threads=place.env.omp_num_threads,
        node=place.env.node,
        model_config=model,
        source=source,
    )


def new_engine(
    place: Place,
    model: ModelConfig,
    links: Links,
    watch: Watch,
    device: DeviceThread,
    worker: Worker,
    *,
    is_embedded: bool = False,
) -> Leader | Peer:
    """`is_embedded`: inside a trainer's rank, where a leader ends with its own front end."""
    if links.leader is not None:
        return Peer(watch, place.leader_rank, links.leader, device, worker, place.startup)
    return Leader(
        place.config,
        model,
        watch,
        device,
        worker,
        links.peers,
        links.front_ends,
        place.address,
        place.startup,
        place.executor,
        home=front_end_name(place.rank) if is_embedded else None,
    )


def new_front_end(place: Place, links: Links, on_frozen: Callable[[RankInfo], None]) -> FrontEnd:
    leaders = [links.roster.members[rank].info for rank in place.layout.leaders]
    return FrontEnd(
        front_end_name(place.rank),
        list(zip(links.replicas, leaders, strict=True)),
        max_concurrent_requests=place.config.max_concurrent_requests,
        walltime=place.walltime,
        heartbeat_seconds=place.config.heartbeat_seconds,
        on_frozen=on_frozen,
        restart_count=place.env.restart_count,
        first_replica=place.layout.coords(place.rank).dp,
    )
