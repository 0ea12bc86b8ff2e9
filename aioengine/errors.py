"""Errors that a person can act on; all that the engine raises on purpose are EngineErrors.

`ValueError` is for what users typed (flags, fields); `assert` is for our own invariants.
"""


class EngineError(Exception):
    """Base of every failure the engine reports; the message names the rank or the limit."""


class StartupError(EngineError):
    """The launch cannot come up: a configuration, file or device problem."""


class StartupTimeoutError(StartupError):
    """Some ranks did not arrive in time; names them and `--startup-timeout-seconds`."""


class HandshakeError(StartupError):
    """A connection on a control port did not prove that it belongs to this launch."""


class WorkerError(EngineError):
    """A device call or step raised on a rank; carries type name, message and traceback text."""

    def __init__(self, where: str, type_name: str, message: str, traceback: str) -> None:
        super().__init__(f"{where}: {type_name}: {message}")
        self.where = where
        self.type_name = type_name
        self.message = message
        self.traceback = traceback


class RankLostError(EngineError):
    """A peer is gone: its connection closed without a goodbye, or its heartbeat stopped."""


class DivergenceError(EngineError):
    """Ranks of one group have entered different collectives, or the same in different jobs."""


class ReplicaFailedError(EngineError):
    """What every call after the first failure gets, at once, with the first cause."""


class StepTimeoutError(EngineError):
    """A step did not complete within `--step-timeout-seconds`."""


class PhaseTimeoutError(EngineError):
    """Ranks did not enter `active()` within its `timeout`; names them."""


class RpcTimeoutError(EngineError):
    """A `collective_rpc` did not end within its `timeout`; names the method and the ranks."""


class RequestFailedError(EngineError):
    """One request ended with an error that concerns it alone, or its replica is gone."""


def innermost(error: Exception) -> Exception:
    """The first exception inside nested groups."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
