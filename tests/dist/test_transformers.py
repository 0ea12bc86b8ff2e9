"""Logits of random checkpoints equal those of transformers, which wrote them: prefill, and decode
after chunked prefill, on one rank and sharded."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.logits_ranks import PROMPTS, compute_logits, token_ids
from support.ranks import run_ranks
from torch import Tensor
from torch.testing import assert_close

transformers_llamas = pytest.importorskip("support.transformers_llamas")
MODELS = transformers_llamas.MODELS
TOLERANCE = {"rtol": 0, "atol": 1e-4}


@dataclass
class Matrix:
    """`expected` by model and request: logits of every position."""

    directory: Path
    expected: dict[str, list[Tensor]]

    def check(self, model: str, logits: dict[str, Tensor]) -> None:
        assert len(logits) > 20
        for key, row in logits.items():
            request, position = map(int, key.split("."))
            assert_close(row, self.expected[model][request][position], **TOLERANCE)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    directory = tmp_path_factory.mktemp("llamas")
    expected = {}
    for seed, (name, shape) in enumerate(MODELS.items()):
        model = transformers_llamas.write_llama(directory / name, shape, seed)
        expected[name] = [
            transformers_llamas.reference_logits(model, token_ids(request, shape["vocab"]))
            for request in range(len(PROMPTS))
        ]
    return Matrix(directory, expected)


@pytest.mark.parametrize("model", MODELS)
def test_one_rank(matrix: Matrix, model: str) -> None:
    matrix.check(model, compute_logits(matrix.directory / model, 1, 1, 0))


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (3, 1), (1, 2)])
def test_several_ranks(matrix: Matrix, tmp_path: Path, tp_size: int, pp_size: int) -> None:
    sizes = (str(tp_size), str(pp_size))
    run_ranks(
        "support.logits_ranks", tp_size * pp_size, str(matrix.directory), *sizes, str(tmp_path)
    )
    for model in MODELS:
        results = sorted(tmp_path.glob(f"{model}.?.safetensors"))
        assert len(results) == tp_size, "every rank of the last stage computes logits"
        for path in results:
            matrix.check(model, load_file(path))


@pytest.mark.parametrize("split", ["1,1,3", "3,1,1"])
def test_uneven_stages(matrix: Matrix, tmp_path: Path, split: str) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "linear-tied").symlink_to(matrix.directory / "linear-tied")
    run_ranks(
        "support.logits_ranks", 3, str(models), "1", "3", str(tmp_path), f"pipeline_layers={split}"
    )
    matrix.check("linear-tied", load_file(tmp_path / "linear-tied.2.safetensors"))
