"""Signals as events, and the launcher's death without one."""

import asyncio
import os
import signal

import pytest

from aioengine.control.signals import Signals


async def test_a_launcher_outside_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun may start a rank as the first process of a container: it has no parent to watch."""
    monkeypatch.setattr(os, "getppid", lambda: 0)
    assert not Signals(1.0, watch_parent=True).first.is_set()


async def received(signals: Signals, *numbers: int) -> None:
    """Sends them to this process, one after the other."""
    seen = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, seen.set)
    for number in numbers:
        os.kill(os.getpid(), number)
        seen.clear()
        os.kill(os.getpid(), signal.SIGUSR2)  # delivered after the one before it
        await seen.wait()


@pytest.mark.parametrize(
    ("numbers", "is_for_walltime", "is_second"),
    [
        ((signal.SIGTERM,), False, False),
        ((signal.SIGTERM, signal.SIGTERM), False, True),
        ((signal.SIGUSR1,), True, False),
        ((signal.SIGUSR1, signal.SIGUSR1), True, False),
        ((signal.SIGUSR1, signal.SIGTERM), True, True),
        ((signal.SIGTERM, signal.SIGUSR1), False, False),
    ],
)
async def test_which_signals_drain_and_which_end(
    numbers: tuple[int, ...], is_for_walltime: bool, is_second: bool
) -> None:
    signals = Signals(1.0, watch_parent=False)
    await received(signals, *numbers)
    assert signals.first.is_set()
    assert (signals.is_for_walltime, signals.second.is_set()) == (is_for_walltime, is_second)


@pytest.mark.parametrize("for_walltime", [False, True])
async def test_sigterm_during_a_drain_that_no_signal_began(for_walltime: bool) -> None:
    """The end of a job ends its streams; torchrun's reaction to a failure does not."""
    signals = Signals(1.0, watch_parent=False)
    signals.request_drain(for_walltime=for_walltime)
    await received(signals, signal.SIGTERM)
    assert signals.second.is_set() == for_walltime
