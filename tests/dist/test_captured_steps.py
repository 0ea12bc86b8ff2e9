"""Several ranks capture and repeat their steps, all-reduces included, with the same results."""

from pathlib import Path

import pytest
from support.launching import STORIES
from support.ranks import run_ranks

pytestmark = pytest.mark.skipif(not STORIES.is_dir(), reason="no ../shared/models here")


@pytest.mark.parametrize(
    ("tp_size", "pp_size"),
    [
        (2, 2),
        pytest.param(2, 1, marks=pytest.mark.layouts),
        pytest.param(1, 2, marks=pytest.mark.layouts),
    ],
)
def test_results_are_the_same_to_the_last_bit(tmp_path: Path, tp_size: int, pp_size: int) -> None:
    results = []
    for max_rows in (0, 64):
        path = tmp_path / f"{max_rows}"
        sizes = (str(tp_size), str(pp_size), str(max_rows))
        run_ranks("support.captured_ranks", tp_size * pp_size, str(STORIES), *sizes, str(path))
        results.append(path.read_bytes())
    computed, captured = results
    assert computed == captured
