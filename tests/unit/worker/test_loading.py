"""What is found in a checkpoint before any rank meets another."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.broken_checkpoints import DAMAGES
from support.launching import STORIES

from aioengine.checkpoint.source import read_model_config, resolve_model
from aioengine.dist.groups import GroupCoordinator
from aioengine.errors import EngineError
from aioengine.worker.loading import StagePlan, check_checkpoint, load_stage

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")
CPU = torch.device("cpu")


def check(model: Path) -> None:
    source = resolve_model(str(model))
    check_checkpoint(source, read_model_config(source))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], str]) -> None:
    model = tmp_path / "model"
    shutil.copytree(STORIES, model)
    check(model)
    message = damage(model)
    with pytest.raises(EngineError) as caught:
        check(model)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("speaks", [True, False])
def test_unread_tensors_get_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, speaks: bool
) -> None:
    shutil.copytree(STORIES, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    extra = {f"model.layers.0.self_attn.{n}_proj.bias": torch.ones(4) for n in "qkvo"}
    extra |= {f"adapter.{n}": torch.ones(1) for n in range(5)}
    extra |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(load_file(path) | extra, path)
    source = resolve_model(str(path.parent))
    cfg = read_model_config(source)
    tp = GroupCoordinator("tp", (0,), 0, device=CPU)
    plan = StagePlan(cfg, range(1, 2), False, False, tp=tp, dtype=torch.float32)
    with caplog.at_level(logging.WARNING):
        stage = load_stage(plan, source, CPU, speaks=speaks)
    assert sum(parameter.nbytes for parameter in stage.parameters()) == plan.num_bytes
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == speaks
    if speaks:
        assert lines[0].startswith("9 tensors of the checkpoint are not part of the model")
        assert lines[0].count("adapter.") == 5
        assert lines[0].endswith(", …")
