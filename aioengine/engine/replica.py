"""Bringing one replica up: a series of device calls that every rank runs in the same order."""

import logging
import time

from aioengine.config import EngineConfig
from aioengine.core.blocks import BlockPool
from aioengine.core.scheduler import Scheduler
from aioengine.engine.device import DeviceThread, DeviceWorker
from aioengine.engine.executor_backend import ExecutorBackend
from aioengine.errors import StartupError
from aioengine.messages import RankInfo, ReplicaReady
from aioengine.model_config import ModelConfig

log = logging.getLogger(__name__)


async def open_replica(
    executor: ExecutorBackend,
    device: DeviceThread,
    worker: DeviceWorker,
    config: EngineConfig,
    model: ModelConfig,
    ranks: tuple[RankInfo, ...],
    address: str,
) -> tuple[Scheduler, ReplicaReady]:
    """Device, process groups, weights, KV cache and warm-up on every rank of the replica.

    `address` is where the leader's store for the process groups listens. Raises
    ReplicaFailedError with the first cause, StartupError when the context does not fit.
    """
    started = time.monotonic()
    devices = await executor.call("open_device")
    check_devices(devices, ranks)
    if len(ranks) > 1:
        port = await device.run(worker.call, "open_store", {"host": address})
        await executor.call("open_groups", host=address, port=port)
        await device.run(worker.call, "close_store", {})
    await executor.call("load_model")
    num_blocks = min(await executor.call("num_kv_blocks"))
    await executor.call("allocate_kv", num_blocks=num_blocks)
    await executor.call("warm_up")
    max_model_len = fit_context(config, model, num_blocks)
    scheduler = Scheduler(
        BlockPool(
            num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching
        ),
        num_slots=config.num_slots,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_stages=config.pipeline_parallel_size,
        max_model_len=max_model_len,
        async_scheduling=config.async_scheduling,
    )
    log.info(
        "replica ready in %.1f s: %d KV blocks of %d tokens, context %d",
        time.monotonic() - started,
        num_blocks - 1,
        config.block_size,
        max_model_len,
    )
    ready = ReplicaReady(
        ranks=ranks,
        num_blocks=num_blocks - 1,
        block_size=config.block_size,
        max_model_len=max_model_len,
        num_slots=config.num_slots,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    return scheduler, ready


def check_devices(devices: list[str], ranks: tuple[RankInfo, ...]) -> None:
    """StartupError when two ranks of a host compute on one accelerator."""
    seen: dict[tuple[str, str], RankInfo] = {}
    for device, info in zip(devices, ranks, strict=True):
        other = seen.setdefault((info.host, device), info)
        if other is not info and device != "cpu":
            raise StartupError(f"{other} and {info} are both on device {device}")


def fit_context(config: EngineConfig, model: ModelConfig, num_blocks: int) -> int:
    """Longest request that the KV cache can take, in tokens.

    Raises StartupError with the numbers when that is less than `--max-model-len`.
    """
    room = (num_blocks - 1) * config.block_size  # block 0 is the null block
    wanted = config.max_model_len
    if wanted is None:
        return min(model.max_position, room)
    if wanted > room:
        raise StartupError(
            f"--max-model-len {wanted} does not fit the KV cache: {num_blocks - 1} blocks of "
            f"{config.block_size} tokens hold {room}; raise --kv-cache-memory-bytes or lower "
            "--max-model-len"
        )
    return wanted
