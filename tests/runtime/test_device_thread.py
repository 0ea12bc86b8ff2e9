"""The device thread: order, look-ahead, errors, and no lost wake-ups."""

import asyncio
import threading

import pytest
from support.fake_worker import LIMIT_S
from support.replicas import device_thread

from aioengine.engine.device import DeviceThread, JobError
from aioengine.errors import WorkerError
from aioengine.messages import JobFailed


class Outcomes:
    """What `on_done` got, in order, on the loop's thread."""

    def __init__(self) -> None:
        self.values: list[object] = []
        self.errors: list[JobError] = []
        self.threads: set[int] = set()

    def take(self, value: object, error: JobError | None) -> None:
        self.threads.add(threading.get_ident())
        if error is not None:
            self.errors.append(error)
        else:
            self.values.append(value)


async def drain(device: DeviceThread) -> None:
    """Return when everything submitted so far is done."""
    await device.run(lambda: None)


async def test_tasks_run_one_after_the_other_on_one_thread() -> None:
    async with device_thread() as device:
        outcomes = Outcomes()
        threads = set()

        def task(number: int) -> int:
            threads.add(threading.get_ident())
            return number

        for number in range(5000):
            device.submit(lambda number=number: task(number), outcomes.take)
        await drain(device)
        assert outcomes.values == list(range(5000))
        assert outcomes.threads == {threading.get_ident()}
        assert len(threads) == 1
        assert threads != outcomes.threads


async def test_many_runs_at_once() -> None:
    async with device_thread() as device:
        async with asyncio.TaskGroup() as tasks:
            runs = [tasks.create_task(device.run(pow, i, 2)) for i in range(500)]
        assert [run.result() for run in runs] == [i * i for i in range(500)]


async def test_ping_pong() -> None:
    """Each task is submitted from the outcome of the one before: a lost wake-up would end it."""
    async with device_thread() as device:
        done = asyncio.get_running_loop().create_future()

        def on_done(value: int, error: JobError | None) -> None:
            if value == 2000:
                done.set_result(value)
            else:
                device.submit(lambda: value + 1, on_done)

        device.submit(lambda: 0, on_done)
        assert await done == 2000


async def test_prepare_runs_before_earlier_tasks_that_wait() -> None:
    async with device_thread() as device:
        events: list[str] = []
        entered, gate = threading.Event(), threading.Event()

        def hold() -> None:
            entered.set()
            assert gate.wait(LIMIT_S)

        def submit(name: str) -> None:
            device.submit(
                lambda: events.append(f"run {name}"),
                Outcomes().take,
                lambda: events.append(f"prepare {name}"),
            )

        device.submit(hold, Outcomes().take)
        assert entered.wait(LIMIT_S)
        for name in "abc":
            submit(name)
        gate.set()
        await drain(device)
        assert events[0] == "prepare a"
        assert events.index("prepare b") < events.index("run a")
        assert events.index("prepare c") < events.index("run a")
        assert [e for e in events if e.startswith("run")] == ["run a", "run b", "run c"]


async def test_exceptions_come_as_text_and_later_tasks_run() -> None:
    async with device_thread() as device:
        outcomes = Outcomes()
        device.submit(lambda: 1 / 0, outcomes.take)
        device.submit(lambda: "next", outcomes.take)
        await drain(device)
        (error,) = outcomes.errors
        assert outcomes.values == ["next"]
        assert (error.type_name, error.message) == ("ZeroDivisionError", "division by zero")
        assert "Traceback" in error.traceback
        assert error.as_message(7) == JobFailed(7, error.type_name, error.message, error.traceback)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, GeneratorExit])
async def test_no_exception_ends_the_thread(error: type[BaseException]) -> None:
    def fail() -> None:
        raise error("now")

    async with device_thread() as device:
        outcomes = Outcomes()
        device.submit(fail, outcomes.take)
        await drain(device)
        assert [e.type_name for e in outcomes.errors] == [error.__name__]


async def test_a_failed_prepare_is_the_tasks_error_and_it_does_not_run() -> None:
    async with device_thread() as device:
        outcomes = Outcomes()
        ran = []
        device.submit(lambda: ran.append(1), outcomes.take, lambda: 1 / 0)
        device.submit(lambda: "next", outcomes.take)
        await drain(device)
        assert [e.type_name for e in outcomes.errors] == ["ZeroDivisionError"]
        assert (ran, outcomes.values) == ([], ["next"])


async def test_run_raises_worker_errors() -> None:
    def explode(text: str) -> None:
        raise KeyError(text)

    async with device_thread() as device:
        with pytest.raises(WorkerError, match="explode: KeyError: 'boom'") as caught:
            await device.run(explode, "boom")
        assert (caught.value.where, caught.value.type_name) == ("explode", "KeyError")
        assert "raise KeyError(text)" in caught.value.traceback


async def test_a_run_that_was_given_up_does_no_harm() -> None:
    async with device_thread() as device:
        gate = threading.Event()
        for function in (gate.wait, lambda: gate.wait() and 1 / 0):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await device.run(function)
        gate.set()
        assert await device.run(pow, 2, 3) == 8
