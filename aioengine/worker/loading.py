"""This rank's stage of the model: how large it is, and its weights from the checkpoint."""

import logging
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from tqdm import tqdm

from aioengine.checkpoint.source import ModelSource
from aioengine.config import Quantization
from aioengine.dist.groups import GroupCoordinator
from aioengine.errors import StartupError
from aioengine.layers.backend import layer_backend
from aioengine.layers.memory import ParameterMemory
from aioengine.layers.module import Placement
from aioengine.layers.quantized_format import Format
from aioengine.layers.team import Team
from aioengine.model_config import ModelConfig
from aioengine.models.llama import LlamaStage
from aioengine.models.registry import STAGES
from aioengine.weights.formats import choose_formats
from aioengine.weights.index import WeightIndex, open_index
from aioengine.weights.loader import Wanted, load_weights, match_weights, unread_weights

logger = logging.getLogger(__name__)

MAX_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What a stage is built from, apart from the device."""

    cfg: ModelConfig
    layers: range
    is_first: bool
    is_last: bool
    tp: GroupCoordinator
    dtype: torch.dtype
    team: Team | None = None
    """The threads that compute on CPU."""
    formats: Mapping[str, Format] = field(default_factory=dict)
    """Of the matrices that stay quantised, by their parameters' names."""

    def build(self, device: torch.device) -> LlamaStage:
        """With uninitialised parameters."""
        backend = layer_backend(device.type, self.dtype, self.team)
        return STAGES[self.cfg.family](
            self.cfg,
            self.layers,
            is_first=self.is_first,
            is_last=self.is_last,
            place=Placement(self.tp, self.dtype, ParameterMemory(device), backend, self.formats),
        )

    def outline(self) -> LlamaStage:
        """Names and shapes of the parameters, without memory behind them."""
        return self.build(torch.device("meta"))

    @property
    def num_bytes(self) -> int:
        """Of this rank's parameters."""
        return sum(parameter.nbytes for parameter in self.outline().parameters())

    @property
    def whole_model(self) -> "StagePlan":
        """As if there were one stage."""
        layers = range(self.cfg.num_layers)
        return replace(self, layers=layers, is_first=True, is_last=True)


def with_formats(plan: StagePlan, source: ModelSource, quantization: Quantization) -> StagePlan:
    """The plan of a stage on CPU, with what stays quantised. Reads headers only.

    Raises StartupError as `load_stage` does.
    """
    index = open_index(source)
    wanted = _match(plan.outline(), index, plan)
    return replace(plan, formats=choose_formats(wanted, index, quantization, plan.dtype))


def describe_formats(plan: StagePlan) -> str:
    """For people: "210 matrices in int4, 1 in int8"; empty when all are floats."""
    names = Counter(stored.name for stored in plan.formats.values())
    counts = [f"{count} in {name}" for name, count in names.most_common()]
    return "matrices kept quantised: " + ", ".join(counts) if counts else ""


def load_stage(
    plan: StagePlan, source: ModelSource, device: torch.device, *, speaks: bool
) -> LlamaStage:
    """Build and fill a stage. One rank of a launch `speaks`: it shows progress and warns.

    Raises StartupError that names file and tensor for what is missing, unreadable or of another
    shape.
    """
    index = open_index(source)
    if speaks:
        _warn_of_unread(index, plan.whole_model)
    stage = plan.build(device)
    matched = _match(stage, index, plan)
    if not speaks:
        load_weights(matched, index)  # tqdm leaves a thread behind when it is disabled
        return stage
    if not sys.stderr.isatty():
        load_weights(matched, index, _QuarterLines())
        return stage
    with tqdm(desc="loading weights", unit="B", unit_scale=True) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        load_weights(matched, index, show)
    return stage


class _QuarterLines:
    """Progress for a log: a line at each quarter instead of a bar."""

    def __init__(self) -> None:
        self._quarters = 0

    def __call__(self, done: int, total: int) -> None:
        quarters = 4 * done // total
        if quarters > self._quarters:
            self._quarters = quarters
            logger.info("loading weights: %d %% of %.0f MB", 25 * quarters, total / 1e6)


def check_checkpoint(source: ModelSource, cfg: ModelConfig) -> None:
    """StartupError, like `load_stage`, for what is wrong with any tensor's place or shape.

    Every rank looks at the whole model, before it meets another: a launch with a broken checkpoint
    ends on all ranks at once. Needs no group and no device, and reads no tensor.
    """
    index = open_index(source)
    if cfg.num_layers > len(index.names()):
        raise StartupError(
            f"{source.path}: {cfg.num_layers} layers, but only {len(index.names())} tensors"
        )
    alone = GroupCoordinator("outline", (0,), 0, device=torch.device("meta"))
    plan = StagePlan(cfg, range(cfg.num_layers), True, True, tp=alone, dtype=torch.float32)
    _match(plan.outline(), index, plan)


def _match(stage: LlamaStage, index: WeightIndex, plan: StagePlan) -> list[Wanted]:
    return match_weights(
        stage, index, stage.shards(), tie_word_embeddings=plan.cfg.tie_word_embeddings
    )


def _warn_of_unread(index: WeightIndex, model: StagePlan) -> None:
    unread = unread_weights(index, dict(model.outline().named_parameters()))
    if unread:
        logger.warning(
            "%d tensors of the checkpoint are not part of the model and stay unread: %s%s",
            len(unread),
            ", ".join(unread[:MAX_NAMES_SHOWN]),
            ", …" if len(unread) > MAX_NAMES_SHOWN else "",
        )
