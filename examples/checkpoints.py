"""Checkpoints that no run loses: damage that is named, saves that are awaited.

All processes of a run call these functions in the same order. A process that ended alone would leave
the others waiting for it, so whatever fails on one of them ends all of them, with the same sentence.
"""

import concurrent.futures
import contextlib
import datetime
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import tensorstore
from orbax.checkpoint import v1 as ocp

from endings import Failed, agreed, awaited, reason
from locks import Lock
from strategies import Refused

SCHEDULE = ("learning_rate", "warm_up", "decay_steps", "final_rate")  # --new-schedule frees them
T = TypeVar("T")
METADATA = ("_CHECKPOINT_METADATA", "state/_METADATA")  # JSON that every checkpoint has


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
                "--checkpoints to start over"
            )
    done = []
    for path, why in bad.items():
        aside = path.with_name(f"{path.name}.damaged-{datetime.datetime.now():%Y%m%d-%H%M%S}")
        path.rename(aside)
        done.append(f"{path} is damaged ({why}): it is {aside.name} now")
    return done


def check_settings(
    directory: str,
    ours: dict[str, Any],
    free: frozenset[str],
    where: Callable[[dict[str, Any]], str],
) -> None:
    """Refuse to go on from a damaged checkpoint, or from another run's. Only reads.

    `free` names settings that may differ this time. `where` says on which devices the stored
    settings run, if they do not run on those that are here.
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
            if theirs.get(name) != value and name not in free
        ]
        if differ:
            raise Refused(
                f"{newest.path} is of a run with {', '.join(differ)}: give the same{where(theirs)} "
                f"to go on with it, {advice(differ)}or choose other --checkpoints to start over"
            )


def advice(differ: list[str]) -> str:
    if all(words.split()[0].removeprefix("--").replace("-", "_") in SCHEDULE for words in differ):
        return "or add --new-schedule to go on with the new one, "
    return ""


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


def checkpoint_in(path: str) -> Path:
    """A checkpoint, or the newest of a folder of them."""
    found = [] if (Path(path) / METADATA[0]).exists() else newest_first(path)
    return Path(found[0].path) if found else Path(path).absolute()


def check_weights(path: str, sizes: dict[str, Any]) -> None:
    """Refuse a checkpoint whose model has other sizes. Reads no array."""
    found = checkpoint_in(path)
    if why := bad_metadata(found):
        raise Refused(f"{found} is not a checkpoint that can be read: {why}")
    noted = ocp.metadata(found).custom_metadata or {}
    theirs = noted.get("settings", {})
    differ = [f"{name} {theirs.get(name)}" for name in sizes if theirs.get(name) != sizes[name]]
    if differ:
        raise Refused(
            f"{found} has a model with {', '.join(differ)}: give its sizes, or its --config"
        )


def load_weights(path: str, target: Any) -> Any:
    """The weights of another run, into the places of these; its optimizer is not read."""
    found = checkpoint_in(path)
    partly = ocp.options.PyTreeOptions.Loading(partial_load=True)

    def work() -> Any:
        with ocp.Context(pytree_options=ocp.options.PyTreeOptions(loading=partly)):
            return ocp.load(found, {"model": target})["model"]

    return loaded(found, work)


def load(saver: ocp.training.Checkpointer, newest: Any, target: Any) -> tuple[Any, dict[str, Any]]:
    """The state, and what was noted beside it."""

    def work() -> tuple[Any, dict[str, Any]]:
        state = saver.load(newest, abstract_state=target)
        return state, saver.metadata(newest).custom_metadata

    return loaded(newest.path, work)


def loaded(path: Any, work: Callable[[], T]) -> T:
    """What `work` reads from a checkpoint, unless that fails on any process."""
    thread = concurrent.futures.ThreadPoolExecutor(1).submit(work)

    def problem() -> Refused | None:
        error = thread.exception() if thread.done() else None
        return damaged(path, reason(error)) if error else None

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
