"""Signals as events, and the launcher's death without one."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
from support.mailbox import LIMIT_S

from aioengine.control import signals as module
from aioengine.control.signals import Signals


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
    signals = Signals(1.0, launcher_pid=0)
    await received(signals, *numbers)
    assert signals.first.is_set()
    assert (signals.is_for_walltime, signals.drain_over.is_set()) == (is_for_walltime, is_second)


@pytest.mark.parametrize("for_walltime", [False, True])
async def test_sigterm_during_a_drain_that_no_signal_began(for_walltime: bool) -> None:
    """The end of a job ends its streams; torchrun's reaction to a failure does not."""
    signals = Signals(1.0, launcher_pid=0)
    signals.request_drain(for_walltime=for_walltime)
    await received(signals, signal.SIGTERM)
    assert signals.drain_over.is_set() == for_walltime


@pytest.fixture
def launcher() -> Iterator["subprocess.Popen[bytes]"]:
    """Some process; its end is what counts."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


async def happens(event: asyncio.Event) -> None:
    async with asyncio.timeout(LIMIT_S):
        await event.wait()


async def test_a_launcher_outside_of_the_container() -> None:
    """srun may start a rank as the first process of a container: it has no parent to watch."""
    assert not Signals(1.0, launcher_pid=0).first.is_set()


async def test_the_launchers_death_cuts_a_drain_short(
    launcher: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that had begun before, with a limit of its own."""
    monkeypatch.setattr(module, "ORPHAN_DRAIN_S", 0.01)
    monkeypatch.setattr(module, "ORPHAN_MARGIN_S", 0.01)
    monkeypatch.setattr(os, "getppid", lambda: launcher.pid)
    signals = Signals(LIMIT_S * 10, launcher.pid)
    stuck = asyncio.Event()
    signals.on_stuck_orphan = stuck.set
    signals.request_drain()
    await asyncio.sleep(0)
    assert not signals.drain_over.is_set()
    launcher.kill()
    await happens(signals.drain_over)
    await happens(stuck)


async def test_a_launcher_that_died_before_anybody_watched_it(
    launcher: "subprocess.Popen[bytes]",
) -> None:
    launcher.kill()
    launcher.wait()
    await happens(Signals(1.0, launcher.pid).first)


async def test_another_process_with_the_number_of_the_launcher() -> None:
    """The launcher is dead and its number was given again: it is not this process's parent."""
    assert os.getppid() != os.getpid()
    await happens(Signals(1.0, os.getpid()).first)
