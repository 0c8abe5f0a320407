"""How a run ends: in a sentence and a status, on all of its processes, after a save if that is possible.

A process that ends alone leaves the others waiting for it. So what one of them cannot do, none does,
and all of them say the same.
"""

import concurrent.futures
import contextlib
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from strategies import Refused

T = TypeVar("T")
FINISHED, FAILED, REFUSED = 0, 1, 2
INTERRUPTED, ABORTED, STOPPED = 128 + signal.SIGINT, 128 + signal.SIGABRT, 128 + signal.SIGTERM
STATUSES = {
    FINISHED: "finished, or nothing left to do",
    FAILED: "failed: an error, a save that failed, a loss that is not finite, or a watchdog",
    REFUSED: "not started: the message says why, and what to change",
    INTERRUPTED: "stopped by Ctrl-C after a save: run the same command to resume",
    ABORTED: "aborted by JAX because another process died: see the output of that one",
    STOPPED: "stopped by SIGTERM after a save: run the same command to resume",
}
LIBRARIES = ("absl", "asyncio", "concurrent.futures")  # the first is Orbax's


class Failed(Exception):
    """Something went wrong during the run. The message says where, and what to do next."""


def reason(error: BaseException) -> str:
    """The error that caused the others, in one line, without paths and stores."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = (str(error) or type(error).__name__).splitlines()[0]
    text = re.sub(r" in OCDBT database.*| \[[\w ]+=.*| \[source locations.*", "", text)
    text = re.sub(r' "/[^"]*":?', "", text)
    return text if len(text) < 200 else f"{text[:200]}…"


# ---- all processes ----------------------------------------------------------------------------


def agree(problem: BaseException | None) -> None:
    """Raise the first problem that any process has on every process."""
    if jax.process_count() > 1:
        kind = "refused" if isinstance(problem, Refused) else "failed"
        told = "" if problem is None else f"{kind} {problem or type(problem).__name__}"
        mine = np.frombuffer(told.encode()[:2000].ljust(2000, b"\0"), np.uint8)
        for process, row in enumerate(multihost_utils.process_allgather(mine)):
            kind, _, sentence = bytes(row).rstrip(b"\0").decode(errors="ignore").partition(" ")
            if kind and process == jax.process_index():
                break
            if kind:
                where = f"process {process}: " if process else ""
                raise {"refused": Refused, "failed": Failed}[kind](where + sentence)
    if problem is not None:
        raise problem


def agreed(work: Callable[[], T]) -> T:
    """Return the result of `work` on this process, unless it fails on any process."""
    try:
        result = work()
    except Exception as error:
        agree(error)
        raise
    agree(None)
    return result


def awaited(
    thread: "concurrent.futures.Future[T]", problem: Callable[[], BaseException | None]
) -> T:
    """Return the result of a thread, unless some process has a problem with its own.

    A process that fails never arrives at the barrier where Orbax makes the others wait. So they
    wait here instead, and tell each other how far they are.
    """
    several = jax.process_count() > 1
    while True:
        concurrent.futures.wait([thread], timeout=0.05 if several else None)
        done = thread.done()
        agree(problem())
        if np.all(multihost_utils.process_allgather(np.array(done)) if several else done):
            return thread.result()


# ---- one process ------------------------------------------------------------------------------


class StopRequests:
    """Whether to save and leave after a step: after SIGTERM, Ctrl-C, or a failure."""

    def __init__(self) -> None:
        self.alone, self.asked, self.interrupted = jax.process_count() == 1, False, False
        catch = [signal.SIGINT, signal.SIGTERM] if self.alone else [signal.SIGINT]
        if threading.current_thread() is not threading.main_thread():
            catch = []  # in a worker of Ray, which no signal reaches
        self.before = {number: signal.signal(number, self.note) for number in catch}

    def note(self, number: int, _: Any) -> None:
        if number == signal.SIGINT:
            self.interrupted = True
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends at once
        self.ask()

    def ask(self) -> None:
        """With several processes, JAX catches SIGTERM, and all of them agree on a last step."""
        if not self.asked and not self.alone:
            os.kill(os.getpid(), signal.SIGTERM)
        self.asked = True

    def after(self, step: int) -> bool:
        return (self.alone and self.asked) or multihost_utils.reached_preemption_sync_point(step)

    def restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Orbax, and the threads that it starts, write pages on each failure: not to the terminal."""
    loggers = [logging.getLogger(name) for name in LIBRARIES]
    before = [(logger.handlers, logger.propagate) for logger in loggers]
    hooks = sys.unraisablehook, threading.excepthook
    logging.raiseExceptions = False  # a full disk: the next save says so, not each line of the log
    for logger in loggers:
        logger.handlers, logger.propagate = [logging.NullHandler()], False

    def note(failure: Any) -> None:
        error = failure.exc_type, failure.exc_value, failure.exc_traceback
        loggers[0].error("in a thread, or when something was deleted", exc_info=error)

    sys.unraisablehook = threading.excepthook = note
    try:
        yield
    finally:
        logging.raiseExceptions = True
        sys.unraisablehook, threading.excepthook = hooks
        for logger, (handlers, propagate) in zip(loggers, before):
            logger.handlers, logger.propagate = handlers, propagate


def leave(status: int) -> None:
    """End this process: after a failure at once, as threads of Orbax may wait for minutes."""
    with contextlib.suppress(Exception):
        jax.process_count()  # raises where a process found no device: the others do not end yet
        jax.distributed.shutdown()
    if status in (FAILED, REFUSED):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
