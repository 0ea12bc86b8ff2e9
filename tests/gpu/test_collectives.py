"""Collectives between two CUDA devices: pytest -m gpu tests/gpu/test_collectives.py"""

import pytest
import torch
from support.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_two_devices() -> None:
    run_ranks("support.cuda_collectives_ranks", 2)
