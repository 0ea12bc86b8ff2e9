"""Whose line it is: every line of a rank's log carries its rank and coordinates."""

import logging
import os
import sys
import threading
from pathlib import Path
from types import TracebackType

from aioengine.rank.place import Place

log = logging.getLogger(__name__)


def set_up_logging(place: Place) -> None:
    """Log to stderr and, with `--log-dir`, to a file per rank.

    Warnings and exceptions that nobody caught become log lines, too. What C++ libraries print, and
    the dump of a crash, cannot be tagged: with `--log-dir` it goes to the rank's file in place of
    stderr. Raises ValueError when that file cannot be written.
    """
    config, info = place.config, place.info
    handlers: list[logging.Handler] = []
    if config.log_dir is not None:
        directory = Path(config.log_dir)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = (directory / f"rank{info.rank}.log").open("a")
        except OSError as error:
            raise ValueError(f"--log-dir {directory}: {error.strerror}") from None
        handlers.append(logging.StreamHandler(file))
        _send_raw_output_to(file.fileno())
    handlers.append(logging.StreamHandler())
    logging.basicConfig(
        level=config.log_level.upper(),
        format=f"%(asctime)s.%(msecs)03d %(levelname)-7s [rank {info.rank} {info.coords}] "
        "%(message)s",
        datefmt="%H:%M:%S",
        handlers=handlers,
    )
    logging.captureWarnings(True)
    sys.excepthook = _log_exception
    sys.unraisablehook = _log_unraisable
    threading.excepthook = _log_thread_exception


def _send_raw_output_to(descriptor: int) -> None:
    """What is written to file descriptor 2 by others than Python, which keeps its stderr."""
    sys.stderr.flush()
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    os.dup2(descriptor, 2)


def _log_exception(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    log.critical("uncaught exception", exc_info=(kind, error, traceback))


def _log_unraisable(found: "sys.UnraisableHookArgs") -> None:
    log.error(
        "%s: %r", found.err_msg or "exception ignored in", found.object, exc_info=found.exc_value
    )


def _log_thread_exception(found: threading.ExceptHookArgs) -> None:
    name = found.thread.name if found.thread is not None else "?"
    log.critical("thread %s ended by an exception", name, exc_info=found.exc_value)
