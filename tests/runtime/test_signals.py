"""Signals and the launcher's death, without either."""

import os

import pytest

from aioengine.control.signals import Signals


async def test_a_launcher_outside_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun may start a rank as the first process of a container: it has no parent to watch."""
    monkeypatch.setattr(os, "getppid", lambda: 0)
    assert not Signals(1.0, watch_parent=True).first.is_set()
