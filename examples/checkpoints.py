"""Checkpoints that no run loses: one run in a folder, damage that is named, saves that are awaited.

All processes of a run call these functions in the same order. A process that ended alone would leave
the others waiting for it, so whatever fails on one of them ends all of them, with the same sentence.
"""

import concurrent.futures
import contextlib
import datetime
import errno
import json
import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import tensorstore
from orbax.checkpoint import v1 as ocp

from endings import Failed, agreed, awaited, reason
from model import Refused

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

METADATA = ("_CHECKPOINT_METADATA", "state/_METADATA")  # JSON that every checkpoint has
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)  # of a file system


# ---- one run in a folder --------------------------------------------------------------------


@contextlib.contextmanager
def writing_to(path: Path, flag: str) -> Iterator[None]:
    """Refuse a file or folder that cannot be written."""
    try:
        yield
    except OSError as error:
        raise Refused(
            f"cannot write to {path} ({error.strerror}): make it writable and make room there, or "
            f"choose other {flag}"
        ) from error


def check_folder(path: Path, flag: str) -> None:
    """Refuse what cannot be a folder, without creating it."""
    for part in (path, *path.parents):
        if part.exists() and not part.is_dir():
            raise Refused(f"{part} is a file, not a folder: choose other {flag}")
        if part.is_symlink() and not part.exists():
            raise Refused(f"{part} is a link to nothing: choose other {flag}")


def lock_file(file: int, wait: bool) -> None:
    """Lock a file for this process; BlockingIOError if another process has it."""
    if sys.platform == "win32":
        os.lseek(file, 1000, os.SEEK_SET)  # a byte that nobody reads: here others could not
        try:
            msvcrt.locking(file, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError(str(error)) from error
    else:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


class Lock:
    """A file, `run.lock`, that names the process that uses a folder.

    The file is also locked (flock), and the system drops that lock when the process ends, however
    it ends. So a process that has the number of a dead one is not mistaken for it. Other hosts may
    not see such locks, so the file of another host is only taken over if `take_over` names it.
    """

    def __init__(self, folder: Path, flag: str, take_over: str | None):
        self.path, self.flag = folder / "run.lock", flag
        self.file: int | None = None
        with writing_to(folder, flag):
            folder.mkdir(parents=True, exist_ok=True)
            while self.file is None:
                self.file = self.try_to_take(take_over)

    def try_to_take(self, take_over: str | None) -> int | None:
        """Return the locked file, or None if it was removed at this moment."""
        try:
            file, new = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
        except FileExistsError:
            try:
                file, new = os.open(self.path, os.O_RDWR), False
            except FileNotFoundError:
                return None
        taken = False
        try:
            free = self.lock(file, wait=new)
            owner, here = self.owner(file), socket.gethostname()
            if free is not False and not self.is_in_place(file):
                return None
            mine = new or (free and owner.get("host") == here)
            if not mine and (free is False or not owner or owner["host"] != take_over):
                raise Refused(self.sentence(owner, free))
            now = f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}"
            name = {"host": here, "process": os.getpid(), "since": now}
            try:
                os.lseek(file, 0, os.SEEK_SET)
                os.write(file, json.dumps(name).ljust(500).encode())
            except OSError:
                os.unlink(self.path)  # the disk is full
                raise
            taken = True
            return file
        finally:
            if not taken:
                os.close(file)

    def lock(self, file: int, wait: bool) -> bool | None:
        """Lock the file for this process: False if another process has it, None if none can."""
        try:
            lock_file(file, wait)
        except BlockingIOError:
            time.sleep(0.1)  # the other process may be about to write its name
            return False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return None
        return True

    def owner(self, file: int) -> dict[str, Any]:
        os.lseek(file, 0, os.SEEK_SET)
        try:
            return dict(json.loads(os.read(file, 500)))
        except ValueError:
            return {}

    def sentence(self, owner: dict[str, Any], free: bool | None) -> str:
        folder, other = self.path.parent, f"choose other {self.flag}"
        if not owner:
            return (
                f"{folder} is in use by a run that has just begun: wait for it, {other}, or, if "
                f"there is no such run, remove {self.path}"
            )
        who = "process {process} on host {host} since {since}".format(**owner)
        if free is False:
            return f"{folder} is in use by {who}: wait for it, end it, or {other}"
        return (
            f"{folder} is in use by {who}, and this host cannot see whether that process still "
            f"runs: if it does not, add --take-over {owner['host']}, or else {other}"
        )

    def is_in_place(self, file: int) -> bool:
        """Is this still the file that others find?"""
        try:
            return os.path.samestat(os.fstat(file), os.stat(self.path))
        except OSError:
            return False

    def check(self) -> None:
        """Fail if the folder was removed or replaced, or if another run has taken it over."""
        if self.file is None or not self.is_in_place(self.file):
            raise Failed(
                f"{self.path} is gone, so {self.path.parent} was moved or removed while this run "
                "used it, and nothing more is saved there: find out by whom, then start again"
            )


def release(locks: list[Lock]) -> None:
    """Remove the files, unless others have replaced them."""
    for lock in locks:
        if lock.file is not None and lock.is_in_place(lock.file):
            with contextlib.suppress(OSError):
                os.unlink(lock.path)
            os.close(lock.file)
            if sys.platform == "win32":  # where an open file cannot be removed
                with contextlib.suppress(OSError):
                    os.unlink(lock.path)
    locks.clear()


def check_shared(folder: Path) -> None:
    """Refuse a folder that other processes do not share with process 0, which has locked it."""
    path, end = folder / "run.lock", time.monotonic() + 10  # network file systems need a while
    while not path.exists():
        if time.monotonic() > end:
            raise Refused(
                f"{path}, which process 0 has written, is not here: choose --checkpoints in "
                "storage that all processes share"
            )
        time.sleep(0.1)
    with writing_to(folder, "--checkpoints"):
        tempfile.TemporaryFile(dir=folder).close()


# ---- what is in it --------------------------------------------------------------------------


def newest_first(directory: str) -> list[Any]:
    """The folders that are named like checkpoints, whole or not."""
    found = ocp.path.step.standard_name_format().find_all(directory)
    return sorted(found, key=lambda checkpoint: checkpoint.step, reverse=True)


def bad_metadata(path: Any) -> str | None:
    """What is wrong with the files that describe a checkpoint. Reads no array."""
    for name in METADATA:
        try:
            json.loads((path / name).read_text())
        except FileNotFoundError:
            return f"it has no {name}"
        except (OSError, ValueError) as error:
            return f"{name}: {reason(error)}"
    return None


def newest_whole(directory: str) -> int | None:
    """The step of the newest checkpoint that looks whole. Reads no array."""
    with contextlib.suppress(OSError):
        for checkpoint in newest_first(directory):
            if bad_metadata(checkpoint.path) is None:
                return int(checkpoint.step)
    return None


def bad_arrays(path: Path) -> str | None:
    """Why an array of a checkpoint cannot be read. Reads all of them, one by one."""
    try:
        expected = len(jax.tree.leaves(ocp.metadata(path).metadata))
        base = {"driver": "ocdbt", "base": f"file://{path}/state/"}
        keys = tensorstore.KvStore.open(base).result().list().result()
        arrays = [key.decode() for key in keys if key.endswith(b"zarr.json")]
        for name in arrays:
            kvstore = base | {"path": name.removesuffix("zarr.json")}
            tensorstore.open({"driver": "zarr3", "kvstore": kvstore}).result().read().result()
    except Exception as error:  # each store raises its own
        return reason(error)
    return None if len(arrays) == expected else f"it has {len(arrays)} of {expected} arrays"


def damaged(path: Any, why: str) -> Refused:
    return Refused(
        f"{path} is damaged ({why}): move it away, or add --skip-damaged, to go on from the newest "
        "checkpoint that is whole"
    )


def set_aside_damaged(directory: str) -> list[str]:
    """Rename the checkpoints that are newer than the newest whole one. Returns what was done."""
    bad: dict[Path, str] = {}
    for checkpoint in newest_first(directory):
        path = Path(checkpoint.path)
        why = bad_metadata(path) or bad_arrays(path)
        if why is None:
            break
        bad[path] = why
    else:
        if bad:
            raise Refused(
                f"no checkpoint in {directory} is whole (step {path.name}: {why}): choose other "
                "--checkpoints to begin anew"
            )
    done = []
    for path, why in bad.items():
        aside = path.with_name(f"{path.name}.damaged-{datetime.datetime.now():%Y%m%d-%H%M%S}")
        path.rename(aside)
        done.append(f"{path} is damaged ({why}): it is {aside.name} now")
    return done


def check_settings(
    directory: str, ours: dict[str, Any], where: Callable[[dict[str, Any]], str]
) -> None:
    """Refuse to go on from a damaged checkpoint, or from another run's. Only reads.

    `where` says on which devices the stored settings run, if they do not run on those that are here.
    """
    for newest in newest_first(directory)[:1]:
        if why := bad_metadata(newest.path):
            raise damaged(newest.path, why)
        noted = ocp.metadata(newest.path).custom_metadata or {}
        if "settings" not in noted:
            raise Refused(
                f"{newest.path} was not written by this program: choose other --checkpoints"
            )
        theirs = noted["settings"]
        differ = [
            f"--{name.replace('_', '-')} {theirs.get(name)} (now {value})"
            for name, value in ours.items()
            if theirs.get(name) != value
        ]
        if differ:
            raise Refused(
                f"{newest.path} is of a run with {', '.join(differ)}: give the same{where(theirs)} "
                "to go on with it, or choose other --checkpoints to begin anew"
            )


# ---- save and load --------------------------------------------------------------------------


def open_checkpoints(directory: str, every: int, keep: int) -> ocp.training.Checkpointer:
    when, what = ocp.training.save_decision_policies, ocp.training.preservation_policies
    return ocp.training.Checkpointer(
        directory,
        # An interval alone would replace the default, which also saves on preemption.
        save_decision_policy=when.AnySavePolicy(
            [when.FixedIntervalPolicy(every), when.PreemptionCheckpointingPolicy()]
        ),
        preservation_policy=what.LatestN(keep),
        cleanup_tmp_directories=True,  # what a kill left of an unfinished save
    )


def load(saver: ocp.training.Checkpointer, newest: Any, target: Any) -> tuple[Any, dict[str, Any]]:
    """The state, and what was noted beside it."""

    def work() -> tuple[Any, dict[str, Any]]:
        state = saver.load(newest, abstract_state=target)
        return state, saver.metadata(newest).custom_metadata

    thread = concurrent.futures.ThreadPoolExecutor(1).submit(work)

    def problem() -> Refused | None:
        error = thread.exception() if thread.done() else None
        return damaged(newest.path, reason(error)) if error else None

    return awaited(thread, problem)


class FirstError(logging.Handler):
    """Keep the first error that a thread of Orbax logs.

    Orbax raises it only after its last barrier. If other processes never arrive there, because they
    wait for this one at an earlier barrier, that takes minutes.
    """

    error: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.module in ("future", "async_checkpointer") and record.exc_info:
            self.error = self.error or record.exc_info[1]


class Saves:
    """Checkpoints that are written in the background, one at a time, and what became of them."""

    def __init__(self, saver: ocp.training.Checkpointer, locks: list[Lock]):
        self.saver, self.locks = saver, locks
        self.thread = concurrent.futures.ThreadPoolExecutor(1)
        self.running: concurrent.futures.Future[Any] | None = None
        self.step, self.first = 0, FirstError()
        self.trouble: Failed | None = None
        logging.getLogger("absl").addHandler(self.first)

    def start(self, step: int, state: Any, noted: dict[str, Any]) -> None:
        """Save, after the save before it has ended, and only if no process has trouble."""
        self.finish()
        agreed(self.check)
        self.step = step
        try:
            response = self.saver.save_async(step, state, force=True, custom_metadata=noted)
        except Exception as error:
            raise self.failure(f"step {step}", self.saver.directory, error) from error
        self.running = self.thread.submit(response.result)

    def check(self) -> None:
        for lock in self.locks:
            lock.check()
        if self.trouble:
            raise self.trouble

    def failure(self, what: str, place: Any, error: BaseException) -> Failed:
        saved = newest_whole(str(self.saver.directory))
        before = f"after step {saved}" if saved else "from step 0, as nothing is saved"
        return Failed(
            f"{what} was not written to {place} ({reason(error)}): make it writable and make room "
            f"there, then start again, and the run goes on {before}"
        )

    def problem(self) -> Failed | None:
        """What this process already knows to have failed."""
        error = self.first.error
        if self.running and self.running.done():
            error = error or self.running.exception()
        if error:
            try:
                self.check()  # the cause may be that somebody removed the folder
            except Failed as cause:
                return cause
            return self.failure(f"step {self.step}", self.saver.directory, error)
        return self.trouble

    def finish(self) -> None:
        """Wait for the save that runs, and fail if it does on any process."""
        if self.running:
            awaited(self.running, self.problem)
            self.running = None

    def close(self) -> None:
        self.finish()
        self.saver.close()
