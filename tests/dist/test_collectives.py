"""Every collective through the custom ops, on real ranks."""

from support.ranks import run_ranks

BACKENDS = ["shm", "gloo"]


def test_eight_ranks() -> None:
    """Of which groups of 2, 3, 4 and 8 are made; one launch for all backends."""
    run_ranks("support.collectives_ranks", 8, *BACKENDS)
