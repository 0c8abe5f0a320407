"""One run in a folder: a lock that names who uses it, and that a dead process does not hold."""

import contextlib
import datetime
import errno
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from endings import Failed
from strategies import Refused

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)  # of a file system


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
