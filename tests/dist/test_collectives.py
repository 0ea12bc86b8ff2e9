"""Every collective through the custom ops, on real ranks."""

import pytest
from support.ranks import run_ranks


@pytest.mark.parametrize("backend", ["gloo"])
def test_eight_ranks(backend: str) -> None:
    """In groups of 2, 3, 4 and 8."""
    run_ranks("support.collectives_ranks", 8, backend)
