"""Products with quantised weights have the same bits whatever the processor's instructions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.quantized_products import digests

from aioengine.kernels.codegen import FEATURES

OLDER = {
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2",
}


@pytest.mark.skipif("+avx2" not in FEATURES, reason="needs AVX2, and is about what came after it")
def test_newer_instructions_change_no_bit() -> None:
    """AVX-512, and VNNI, where this processor has them, against AVX2."""
    found = subprocess.run(
        [sys.executable, "-m", "support.quantized_products"],
        env=os.environ | OLDER,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == digests()
