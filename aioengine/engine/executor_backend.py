"""What a leader needs of an executor, and how `--distributed-executor-backend` names one.

The executor is the leader's way to the ranks of its replica. Ours is `engine.executor.Executor`; a
class of a user's own can stand in its place, most easily a subclass:

    class LoggingExecutor(Executor):
        def submit(self, plan: StepPlan) -> None:
            logging.info("%d tokens", plan.num_tokens)
            super().submit(plan)
"""

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from aioengine.control.channel import Link
from aioengine.control.watch import Failure, Watch
from aioengine.engine.device import DeviceThread, DeviceWorker
from aioengine.engine.executor import Executor, RankNews, StepDone, StepFailed
from aioengine.messages import Heartbeat, PeerCommand, RemoteCall, StepPlan

FLAG: Final = "--distributed-executor-backend"


class ExecutorBackend(Protocol):
    """Runs jobs (plans, device calls, `collective_rpc`) on every rank of one replica.

    All jobs share one sequence, in the order in which the methods below are called, and every rank
    runs them in that order: collectives of different jobs would meet otherwise. Made and called on
    the event loop's thread only, where it calls back, too; only the methods that are `async` may
    take time. Times are in seconds.
    """

    def __init__(
        self,
        watch: Watch,
        device: DeviceThread,
        worker: DeviceWorker,
        peers: dict[int, Link],
        output_rank: int,
        on_step: Callable[[StepDone | StepFailed], None],
        on_news: Callable[[int, RankNews], None],
    ) -> None:
        """Called with keywords, in the leader's process, when all ranks are connected.

        `watch` knows who is who; tell it when a rank is heard, departs, is lost (its link closes),
        or a job raises: `watch.failed` ends the replica. `device` is the thread on which `worker`,
        this rank's own share, must be called. `peers` maps the replica's other ranks (numbers of
        the launch) to links that carry PeerCommand one way and PeerEvent back; they are to be
        started here. `output_rank` is the one that samples: token history goes to no other.

        `on_step` is to be called once for every plan, in the order of `submit`, before the failure
        of the replica: StepDone with the output rank's result, or StepFailed, on a replica of one
        rank only (elsewhere a failed step fails the replica). `on_news` gets the rank and what its
        program or launcher wants, as it comes.
        """

    @property
    def num_in_flight(self) -> int:
        """Plans that were submitted and have not come to `on_step`."""

    @property
    def last_beat(self) -> Heartbeat:
        """What the peers were told last; front ends are told the same."""

    def late_step(self, limit_s: float) -> int | None:
        """A step that has lasted longer, by its place in the sequence: the leader then ends the
        replica. `limit_s` is `--step-timeout-seconds`."""

    def submit(self, plan: StepPlan) -> None:
        """Start a plan on every rank. Never called with more than `max_plans_in_flight` under way,
        nor after the failure of the replica."""

    async def call(self, method: str, **kwargs: Any) -> list[Any]:
        """Run a device call of the worker on every rank; values in rank order.

        Raises ReplicaFailedError with the first cause when a rank raises or is lost.
        """

    async def remote_call(self, call: RemoteCall, timeout_s: float | None) -> Any:
        """`collective_rpc`: the method's values in rank order, or the one of `call.reply_rank`.

        Raises WorkerError when it raises on any rank, RpcTimeoutError after `timeout_s` (None: no
        limit), RankLostError when a rank is lost meanwhile, ReplicaFailedError when the replica
        has failed or ended before. Whoever stops waiting leaves the sequence usable.
        """

    def look(self) -> Heartbeat:
        """The last job that this rank has done, and what its device thread is in. Any thread."""

    def send_heartbeats(self) -> None:
        """Tell every peer the same; called several times per `--heartbeat-seconds`."""

    def broadcast(self, message: PeerCommand) -> None:
        """To every peer, behind the jobs that were sent before."""

    def unanswered(self) -> tuple[str, list[int]]:
        """The oldest device call that has not ended, and the ranks that have not answered it (""
        and none when there is none): whom to name when the start-up limit is over."""

    async def shut_down(self, timeout_s: float) -> None:
        """The replica ends in order: tell the peers, and wait for their goodbyes.

        Called once, when no plan is in flight or wanted any more. Raises ReplicaFailedError that
        names the ranks which did not end in time.
        """

    async def announce_failure(self, failure: Failure) -> None:
        """Tell the peers that are left why the replica ends. Called at most once, last."""


METHODS: Final = [name for name in vars(ExecutorBackend) if not name.startswith("_")]


def load_executor(name: str) -> type[ExecutorBackend]:
    """The class that the flag names. Raises ValueError that says what is wrong with it.

    It runs the code of a module that the command line names, as any import does.
    """
    if name == "auto":
        return Executor
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise ValueError(f"{FLAG}: expected auto or module:Class, got {name!r}")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module may raise anything
        raise ValueError(
            f"{FLAG} {name}: cannot import {module_name}: {type(error).__name__}: {error}"
        ) from error
    if not hasattr(module, class_name):
        raise ValueError(f"{FLAG} {name}: module {module_name} has no {class_name}")
    found = getattr(module, class_name)
    if not isinstance(found, type):
        raise ValueError(f"{FLAG} {name}: {class_name} is no class but a {type(found).__name__}")
    if missing := [method for method in METHODS if not _has(found, method)]:
        raise ValueError(
            f"{FLAG} {name}: {class_name} is no executor, it lacks {', '.join(missing)}"
        )
    if misfits := list(_misfits(found)):
        raise ValueError(f"{FLAG} {name}: {class_name}: {'; '.join(misfits)}")
    return found


def _has(found: type, method: str) -> bool:
    """Not when it only inherits the declaration above, or an abstract method."""
    mine = getattr(found, method, None)
    is_written = mine is not None and mine is not getattr(ExecutorBackend, method)
    return is_written and not getattr(mine, "__isabstractmethod__", False)


def _misfits(found: type) -> Iterator[str]:
    """What cannot be called in the way in which the leader calls it."""
    arguments = [*inspect.signature(ExecutorBackend.__init__).parameters][1:]
    try:
        inspect.signature(found).bind(**dict.fromkeys(arguments))
    except (TypeError, ValueError) as error:
        yield f"its constructor must take the keywords {', '.join(arguments)} ({error})"
    for name in METHODS:
        mine, declared = getattr(found, name), getattr(ExecutorBackend, name)
        if not inspect.isfunction(declared):
            continue  # a property
        if not inspect.isfunction(mine):
            yield f"{name} is no method"
            continue
        wanted = inspect.signature(declared)
        try:
            inspect.signature(mine).bind(*_positions(wanted))
        except TypeError as error:
            yield f"{name} must take {wanted} ({error})"
        is_async = inspect.iscoroutinefunction(declared)
        if inspect.iscoroutinefunction(mine) != is_async:
            yield f"{name} must {'' if is_async else 'not '}be async"


def _positions(signature: inspect.Signature) -> list[str]:
    """The parameters that the leader gives by position."""
    return [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
