"""A model's bytes on a layout, from the engine's own code: its shapes on torch's meta device.

Imported only for `aioengine layout --model`, because torch takes seconds.
"""

from typing import Final

import torch

from aioengine.checkpoint.source import ModelSource, read_model_config, resolve_model
from aioengine.cli.layout_facts import KVRoom, ModelFacts, StageFacts
from aioengine.config import EngineConfig
from aioengine.core.stages import check_fits_model, split_layers
from aioengine.dist.groups import GroupCoordinator
from aioengine.layout import ParallelLayout
from aioengine.model_config import ModelConfig
from aioengine.worker.kv_store import KVShape
from aioengine.worker.loading import StagePlan, with_formats
from aioengine.worker.memory import KVBudget, num_kv_blocks

META: Final = torch.device("meta")


def read_model_facts(config: EngineConfig, layout: ParallelLayout) -> ModelFacts:
    """Reads configuration and headers only, no tensor, and downloads no weights.

    Raises ValueError or StartupError, as a launch would, for a model that is not there or that the
    settings do not fit.
    """
    source = resolve_model(config.model, config.startup_timeout_seconds, weights=False)
    cfg = read_model_config(source)
    check_fits_model(config, cfg)
    dtype_name = cfg.dtype if config.dtype == "auto" else config.dtype
    dtype: torch.dtype = getattr(torch, dtype_name)
    split = split_layers(cfg.num_layers, layout.pp_size, config.stage_layers())

    def planned(stage: int, tp_size: int) -> StagePlan:
        return _with_formats(config, source, stage_plan(cfg, split, stage, tp_size, dtype))

    alone = stage_plan(cfg, split, 0, 1, dtype).whole_model
    plans = [planned(stage, layout.tp_size) for stage in range(len(split))]
    max_model_len = config.max_model_len or cfg.max_position
    return ModelFacts(
        cfg=cfg,
        dtype=dtype_name,
        max_model_len=max_model_len,
        whole_bytes=_with_formats(config, source, alone).num_bytes,
        stages=tuple(
            StageFacts(
                layers=plan.layers,
                weight_bytes=plan.num_bytes,
                kv_token_bytes=kv_shape(plan, block_size=1).block_bytes,
            )
            for plan in plans
        ),
        kv_room=_kv_room(config, plans, max_model_len),
    )


def stage_plan(
    cfg: ModelConfig, split: tuple[range, ...], stage: int, tp_size: int, dtype: torch.dtype
) -> StagePlan:
    """What the first tp rank of a stage builds; the others' parameters have the same shapes."""
    tp = GroupCoordinator("outline", tuple(range(tp_size)), 0, device=META)
    return StagePlan(
        cfg,
        split[stage],
        is_first=stage == 0,
        is_last=stage == len(split) - 1,
        tp=tp,
        dtype=dtype,
    )


def _with_formats(config: EngineConfig, source: ModelSource, plan: StagePlan) -> StagePlan:
    """Where the layout is for CPU, or weights are asked for that only CPU has."""
    if config.device != "cpu" and config.quantization in ("auto", "none"):
        return plan
    return with_formats(plan, source, config.quantization)


def kv_shape(plan: StagePlan, block_size: int) -> KVShape:
    return KVShape.of(
        plan.cfg,
        plan.layers,
        tp_rank=plan.tp.rank_in_group,
        tp_size=plan.tp.world_size,
        block_size=block_size,
        dtype=plan.dtype,
    )


def _kv_room(config: EngineConfig, plans: list[StagePlan], max_model_len: int) -> KVRoom | None:
    given = config.kv_cache_memory_bytes
    if given is None:
        return None
    num_blocks = min(
        num_kv_blocks(
            config,
            budget=KVBudget(given, "--kv-cache-memory-bytes"),
            block_bytes=kv_shape(plan, config.block_size).block_bytes,
            max_model_len=max_model_len,
        )
        for plan in plans
    )
    return KVRoom(given, num_blocks - 1, config.block_size)
