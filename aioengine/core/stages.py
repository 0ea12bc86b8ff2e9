"""Which decoder layers each pipeline stage owns, and whether settings fit a model at all."""

from aioengine.config import EngineConfig
from aioengine.model_config import ModelConfig


def split_layers(
    num_layers: int, pp_size: int, override: tuple[int, ...] | None
) -> tuple[range, ...]:
    """Global layer numbers of every stage, first stage first.

    `override` is `--pipeline-layers` as numbers. Without it the split is even and what is left over
    goes, one layer each, to the stages before the last (which also computes the logits).
    """
    if pp_size > num_layers:
        raise ValueError(
            f"--pipeline-parallel-size {pp_size} is more than the model's {num_layers} layers"
        )
    if override is None:
        per_stage, left_over = divmod(num_layers, pp_size)
        last = pp_size - 1
        sizes = tuple(per_stage + (last - left_over <= stage < last) for stage in range(pp_size))
    else:
        assert len(override) == pp_size
        sizes = override
    if sum(sizes) != num_layers:
        shown = ",".join(map(str, sizes))
        raise ValueError(
            f"--pipeline-layers {shown} adds up to {sum(sizes)}, the model has {num_layers} layers"
        )
    ends = [sum(sizes[: stage + 1]) for stage in range(pp_size)]
    return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))


def check_fits_model(config: EngineConfig, model: ModelConfig) -> None:
    """ValueError for settings that the model cannot follow."""
    split_layers(model.num_layers, config.pipeline_parallel_size, config.stage_layers())
    if config.max_model_len is not None and config.max_model_len > model.max_position:
        raise ValueError(
            f"--max-model-len {config.max_model_len} is more than the {model.max_position} "
            f"positions that {model.name} was trained for"
        )
