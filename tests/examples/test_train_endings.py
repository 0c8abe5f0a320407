"""How examples/train.py ends when it cannot go on: in a sentence, at once, and no checkpoint is lost.

What only refuses runs in this process; what could hang, or is killed, in processes of its own.
"""

import errno
import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import lives
import pytest
import tensorstore

import checkpoints
import endings
import locks
import reporting
import train
from strategies import Refused

pytestmark = pytest.mark.usefixtures("compiled_once")  # programs alone

BASE = ["--strategy", "fsdp", "--save-every", "2", "--log-every", "1"]


def ran(capfd, folder, *arguments, status=train.FINISHED, small=BASE):
    """What train.py says when it runs in this process and ends with this status."""
    capfd.readouterr()
    command = [*lives.SMALL, "--checkpoints", folder, *small, *arguments]
    got = train.main([str(part) for part in command])
    said = capfd.readouterr().err
    assert got == status, f"exit {got}, not {status}:\n{said}"
    return said


def sentence(said):
    """The one line that is allowed, without its beginning."""
    lines = [line for line in said.splitlines() if not line.startswith("[Gloo]")]
    assert len(lines) == 1 and lines[0].startswith("train.py: "), said
    return lines[0].removeprefix("train.py: ")


def everything(folder):
    return {path: path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four steps, saved after each second one."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    command = [*lives.SMALL, "--checkpoints", folder, *BASE, "--steps", "4"]
    assert train.main([str(part) for part in command]) == train.FINISHED
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it, with its logs."""
    shutil.copytree(finished, tmp_path / "run")
    shutil.copytree(f"{finished}-logs", tmp_path / "run-logs")
    return tmp_path / "run"


# ---- what would train alone, or nowhere --------------------------------------------------------


@pytest.mark.parametrize("arguments, says", [
    ("--coordinator host:1", "--coordinator without --processes would train alone"),
    ("--coordinator host:1 --process 1", "--coordinator without --processes would train alone"),
    ("--process 0", "--process without --processes would train alone"),
    ("--processes 2 --process 0", "--process 0 needs --coordinator HOST:PORT"),
    ("--processes 2 --coordinator nonsense --process 0", "nonsense is not HOST:PORT"),
    ("--processes 2 --coordinator host: --process 0", "host: is not HOST:PORT"),
    ("--processes 2 --coordinator :8476 --process 0", ":8476 is not HOST:PORT"),
    ("--processes 2 --coordinator host:99999 --process 0", "host:99999 is not HOST:PORT"),
    ("--processes 2 --coordinator host:1 --process 2", "--process 2 is not one of 2: count from 0 to 1"),
    ("--processes 2 --coordinator host:1 --process -1", "--process -1 is not one of 2"),
])  # fmt: skip
def test_processes_that_cannot_meet_are_refused(tmp_path, capfd, arguments, says):
    assert says in sentence(ran(capfd, tmp_path / "run", *arguments.split(), status=train.REFUSED))
    assert not list(tmp_path.iterdir())


def test_one_process_may_be_told_that_it_is_the_only_one(tmp_path, capfd):
    """As examples/launch/ssh.sh does with one host."""
    alone = ["--processes", "1", "--process", "0", "--coordinator", "host:1", "--steps", "1"]
    assert "finished: step 1 is saved" in ran(capfd, tmp_path / "run", *alone)


@pytest.mark.parametrize("flag", ["--checkpoints", "--logs"])
@pytest.mark.parametrize("name", ["", "  "])
def test_a_folder_without_a_name_is_refused(tmp_path, monkeypatch, capfd, flag, name):
    """What a shell makes of a variable that is not set."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        train.main([flag, name])
    assert ended.value.code == train.REFUSED
    assert f"argument {flag}: the name is empty" in sentence(capfd.readouterr().err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["run", "run/below", "run/below/that"])
@pytest.mark.parametrize("kind", ["file", "link to a file", "link to nothing"])
def test_a_file_where_a_folder_should_be_is_refused(tmp_path, capfd, where, kind):
    (tmp_path / "file").write_text("mine")
    if kind == "file":
        (tmp_path / "run").write_text("mine")
    else:
        (tmp_path / "run").symlink_to(tmp_path / kind.rpartition(" ")[2])
    before = sorted(tmp_path.rglob("*"))
    what = "a link to nothing" if "nothing" in kind else "a file, not a folder"
    for folder, more in [(tmp_path / where, ()), (tmp_path / "new", ("--logs", tmp_path / where))]:
        flag = "--logs" if more else "--checkpoints"
        said = sentence(ran(capfd, folder, *more, status=train.REFUSED))
        assert said == f"{tmp_path}/run is {what}: choose other {flag}"
    assert sorted(tmp_path.rglob("*")) == before


def test_a_missing_gpu_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(lives, "environment", lambda _: os.environ | {"JAX_PLATFORMS": "cuda"})
    said = sentence(lives.train(tmp_path / "run", status=train.REFUSED))
    assert said.startswith("JAX finds no device of the platform cuda")
    assert "unset JAX_PLATFORMS" in said and not (tmp_path / "run").exists()


# ---- one run in a folder -----------------------------------------------------------------------


def test_a_second_run_in_a_folder_is_refused_until_the_first_is_dead(tmp_path, capfd):
    """Also through a link, and while the first one is stopped. A killed one is taken over."""
    folder, here = tmp_path / "run", socket.gethostname()
    first = lives.started(folder, *BASE, "--steps", 100_000, devices=1)
    lives.wait_until(lambda: lives.last_step(folder) > 4, first)
    (tmp_path / "link").symlink_to(folder)
    first.send_signal(signal.SIGSTOP)
    before = everything(tmp_path)
    for name in ("run", "link"):
        said = sentence(ran(capfd, tmp_path / name, "--steps", 8, status=train.REFUSED))
        assert said.startswith(f"{tmp_path / name} is in use by process {first.pid} on host {here}")
    assert everything(tmp_path) == before, "the second run has touched what the first one wrote"
    lives.killed(first)
    assert (folder / "run.lock").exists()
    newest = max(lives.complete(folder))
    said = ran(capfd, folder, "--steps", newest + 2)
    assert lives.first_step(said) == newest
    assert [int(row["step"]) for row in lives.metrics(folder)] == [*range(1, newest + 3)]
    assert not list(tmp_path.rglob("run.lock")), "an orderly end leaves the lock behind"


def test_two_folders_of_checkpoints_cannot_share_one_of_logs(run, tmp_path, capfd):
    lock = locks.Lock(tmp_path / "run-logs", "--logs", None)
    more = ["--logs", tmp_path / "run-logs", "--steps", "1"]
    said = sentence(ran(capfd, tmp_path / "other", *more, status=train.REFUSED))
    assert "run-logs is in use by process" in said and "choose other --logs" in said
    locks.release([lock])


def left_behind(folder, host, process):
    """The lock of a run that ended without a word."""
    folder.mkdir(exist_ok=True)
    owner = {"host": host, "process": process, "since": "2026-11-28 13:40:00"}
    (folder / "run.lock").write_text(json.dumps(owner))


def test_a_lock_of_another_host_needs_its_name(run, capfd):
    left_behind(run, "gpu7", 4711)
    for more in ([], ["--take-over", "gpu8"], ["--take-over", socket.gethostname()]):
        said = sentence(ran(capfd, run, "--steps", "5", *more, status=train.REFUSED))
        assert "in use by process 4711 on host gpu7 since 2026-11-28 13:40:00" in said
        assert "add --take-over gpu7" in said
    assert lives.first_step(ran(capfd, run, "--steps", "5", "--take-over", "gpu7")) == 4
    assert not (run / "run.lock").exists()


def test_a_process_number_that_is_used_again_does_not_hold_a_lock(run, capfd):
    """The lock names a process that lives, this one, but not as the owner of the lock."""
    left_behind(run, socket.gethostname(), os.getpid())
    assert "nothing left to do" in ran(capfd, run, "--steps", "4")


def test_a_lock_that_names_nobody_is_not_taken(run, capfd):
    """On another host, somebody may have created it just now."""
    (run / "run.lock").touch()
    said = sentence(ran(capfd, run, "--steps", "5", status=train.REFUSED))
    assert "has just begun" in said and f"remove {run}/run.lock" in said


def test_where_a_file_system_has_no_locks_the_dead_need_a_name_too(run, monkeypatch, capfd):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    here = socket.gethostname()
    left_behind(run, here, 4711)
    assert f"--take-over {here}" in ran(capfd, run, "--steps", "4", status=train.REFUSED)
    assert "nothing left to do" in ran(capfd, run, "--steps", "4", "--take-over", here)


STARTS = {
    "nobody was here": lambda folder: folder.mkdir(),
    "one left its lock": lambda folder: left_behind(folder, socket.gethostname(), 1),
}


@pytest.mark.parametrize("before", STARTS)
def test_of_eight_that_start_at_once_one_gets_the_folder(tmp_path, before):
    """Each opens the file itself, so that threads are as good as processes."""
    for number in range(20):
        folder, together, got, refused = tmp_path / str(number), threading.Barrier(8), [], []
        STARTS[before](folder)

        def start(folder=folder, together=together, got=got, refused=refused):
            together.wait()
            try:
                got.append(locks.Lock(folder, "--checkpoints", None))
            except Refused as refusal:
                refused.append(refusal)

        threads = [threading.Thread(target=start) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(got), len(refused)) == (1, 7), refused
        got[0].check()
        locks.release(got)
        assert not list(folder.iterdir())


def test_a_file_that_was_removed_since_it_was_opened_is_no_lock(tmp_path, monkeypatch):
    """One run ends and another begins, just after a third has opened the file of the first."""
    first, others = locks.Lock(tmp_path, "--checkpoints", None), []
    flock = locks.fcntl.flock

    def late(file, operation):
        monkeypatch.setattr(locks.fcntl, "flock", flock)
        locks.release([first])
        others.append(locks.Lock(tmp_path, "--checkpoints", None))
        flock(file, operation)

    monkeypatch.setattr(locks.fcntl, "flock", late)
    with pytest.raises(Refused, match="in use by process"):
        locks.Lock(tmp_path, "--checkpoints", None)
    others[0].check()
    locks.release(others)


def test_both_processes_of_a_second_run_say_why(tmp_path):
    """The lock is this test's own. Process 1 did not look for it."""
    folder = tmp_path / "run"
    lock = locks.Lock(folder, "--checkpoints", None)
    with lives.together(folder, 2, *BASE, "--steps", 4, devices=1) as processes:
        for process in processes:
            said = sentence(lives.ended(process, train.REFUSED, limit=200))
            assert f"in use by process {os.getpid()}" in said
    lock.check()
    locks.release([lock])


def test_processes_that_do_not_share_a_folder_are_refused(tmp_path):
    here, there = tmp_path / "0" / "run", tmp_path / "1" / "run"
    for folder in (here, there):
        folder.parent.mkdir()
    with lives.together(here, 2, *BASE, devices=1, own={1: {"folder": there}}) as processes:
        for process in processes:
            said = sentence(lives.ended(process, train.REFUSED, limit=200))
            assert f"{there}/run.lock, which process 0 has written, is not here" in said


@pytest.mark.parametrize("how", ["removed", "moved", "begun again by another run"])
def test_a_folder_that_is_taken_away_is_noticed_before_the_next_save(tmp_path, monkeypatch, capfd, how):  # fmt: skip
    folder, write = tmp_path / "run", reporting.Metrics.write

    def write_and_take_away(metrics, row):
        write(metrics, row)
        if row["step"] == 3:
            while not lives.complete(folder):
                time.sleep(0.01)
            folder.rename(tmp_path / "moved") if how == "moved" else shutil.rmtree(folder)
            if how.startswith("begun"):
                left_behind(folder, socket.gethostname(), 1)

    monkeypatch.setattr(reporting.Metrics, "write", write_and_take_away)
    said = ran(capfd, folder, "--steps", "4", status=train.FAILED).splitlines()[-1]
    assert said.startswith(f"train.py: {folder}/run.lock is gone")
    assert how != "moved" or lives.complete(tmp_path / "moved") == [2]
    assert how == "moved" or not lives.complete(folder)
    assert (folder / "run.lock").exists() == how.startswith("begun"), "not this run's to remove"


# ---- saves that fail ---------------------------------------------------------------------------


THEN_RUN = "import ctypes, os, resource, sys; {}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
# Root may write anywhere, but not without CAP_DAC_OVERRIDE (1), dropped by PR_CAPBSET_DROP (24).
NO_ROOT = THEN_RUN.format("os.geteuid() or ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)")
# No file may grow beyond 100,000 bytes: an error like that of a full disk, for anyone.
FULL_DISK = THEN_RUN.format("resource.setrlimit(resource.RLIMIT_FSIZE, (100_000,) * 2)")
WITHOUT_RIGHTS, ON_A_FULL_DISK = (
    {"devices": 1, "program": ["-c", code, lives.TRAIN]} for code in (NO_ROOT, FULL_DISK)
)


@pytest.mark.parametrize("count", [1, 2])
def test_a_folder_that_cannot_be_written_is_refused_at_the_start(run, count):
    """It can be read. Nothing hangs, also with a watchdog, which would end it with another status."""
    before = everything(run)
    run.chmod(0o555)
    more = [*BASE, "--steps", 8, "--watchdog", 100]
    try:
        if count == 2:
            with lives.together(run, 2, *more, **WITHOUT_RIGHTS) as both:
                heard = [lives.ended(process, train.REFUSED, limit=200) for process in both]
        else:
            one = lives.started(run, *more, **WITHOUT_RIGHTS)
            heard = [lives.ended(one, train.REFUSED, limit=200)]
    finally:
        run.chmod(0o755)
    for said in heard:
        assert sentence(said).startswith(f"cannot write to {run} (Permission denied)")
    assert everything(run) == before


def test_a_folder_that_is_closed_while_it_trains_ends_the_run(tmp_path):
    """Threads of Orbax then wait for a folder that nobody makes, for five minutes."""
    run = tmp_path / "run"
    process = lives.started(run, *BASE, "--steps", 100_000, **WITHOUT_RIGHTS)
    try:
        lives.wait_until(lambda: lives.complete(run), process)
        run.chmod(0o555)
        said = lives.ended(process, train.FAILED, limit=200)
    finally:
        run.chmod(0o755)
    newest = max(lives.complete(run))
    assert f"was not written to {run} (Permission denied)" in said and "Traceback" not in said
    assert f"goes on after step {newest}" in said and len(lives.arrays(run, newest)) > 10


LARGE = ["--strategy", "fsdp", "--save-every", 2, "--log-every", 1, "--D", 64, "--F", 512]


def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(tmp_path):
    run = tmp_path / "run"
    lives.train(run, *LARGE, "--steps", 2, devices=1)
    before = lives.arrays(run, 2)
    more = [*LARGE, "--steps", 100_000, "--watchdog", 100]
    said = lives.ended(lives.started(run, *more, **ON_A_FULL_DISK), train.FAILED, 200)
    assert sentence(re.sub(r"(?m)^20.*\n", "", said)).startswith(f"step 4 was not written to {run}")
    assert "File too large" in said and "goes on after step 2" in said
    assert lives.complete(run) == [2] and not (run / "run.lock").exists()
    assert lives.same_bits(lives.arrays(run, 2), before) == []


def test_a_save_that_fails_on_one_process_ends_both(tmp_path):
    run, more = tmp_path / "run", [*LARGE, "--steps", 100_000]
    with lives.together(run, 2, *more, devices=1, own={1: ON_A_FULL_DISK}) as processes:
        for process, who in zip(processes, ("process 1: ", "")):
            said = lives.ended(process, train.FAILED, limit=200)
            lines = [line for line in said.splitlines() if line.startswith("train.py: ")]
            assert len(lines) == 1 and "Traceback" not in said, said
            assert lines[0].startswith(f"train.py: {who}step 2 was not written to {run} (")
    assert lives.complete(run) == [] and not (run / "run.lock").exists()


def test_metrics_that_cannot_be_written_end_the_run_before_the_step_is_saved(run, monkeypatch, capfd):  # fmt: skip
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(reporting.Metrics, "write", fail)
    said = ran(capfd, run, "--steps", "8", status=train.FAILED).splitlines()[-1]
    assert f"{run}-logs (No space left on device)" in said and "goes on after step 4" in said
    assert lives.complete(run) == [2, 4]


# ---- damaged checkpoints -----------------------------------------------------------------------


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def largest(folder):
    return max(folder.rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)


def forget_an_array(folder):
    """Everything else is as it was."""
    store = {"driver": "ocdbt", "base": f"file://{folder}/state/"}
    tensorstore.KvStore.open(store).result().delete_range(
        tensorstore.KvStore.KeyRange("model.w_DV.value/", "model.w_DV.value0")
    ).result()


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


DAMAGE = {
    "a data file that was cut": lambda run: cut(largest(run / "4")),
    "an index that was cut": lambda run: cut(largest(run / "4" / "state" / "d")),
    "a manifest that was cut": lambda run: cut(run / "4" / "state" / "manifest.ocdbt"),
    "an array less": lambda run: forget_an_array(run / "4"),
    "no data": lambda run: shutil.rmtree(next((run / "4" / "state").glob("ocdbt.*"))),
    "no state": lambda run: shutil.rmtree(run / "4" / "state"),
    "an emptied folder": lambda run: empty(run / "4"),
    "a stray folder": lambda run: (run / "999").mkdir(),
    "no _METADATA": lambda run: (run / "4" / "state" / "_METADATA").unlink(),
    "a _METADATA that was cut": lambda run: cut(run / "4" / "state" / "_METADATA"),
    "no _CHECKPOINT_METADATA": lambda run: (run / "4" / "_CHECKPOINT_METADATA").unlink(),
    "a _CHECKPOINT_METADATA that was cut": lambda run: cut(run / "4" / "_CHECKPOINT_METADATA"),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's, later
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_in_a_sentence_and_skipped_if_asked(run, capfd, damage):
    DAMAGE[damage](run)
    step, before = "999" if "stray" in damage else "4", everything(run)
    said = sentence(ran(capfd, run, "--steps", "5", status=train.REFUSED))
    assert said.startswith(f"{run}/{step} is damaged (") and len(said) < 400
    assert "move it away, or add --skip-damaged" in said
    assert everything(run) == before
    aside, whole = checkpoints.set_aside_damaged(str(run)), 4 if "stray" in damage else 2
    assert len(aside) == 1 and f"{run}/{step} is damaged (" in aside[0]
    assert lives.complete(run) == [2, 4][: whole // 2]
    kept = {file.name for path in run.glob("*.damaged-*") for file in path.rglob("*")}
    assert {path.name for path in before if f"{run}/{step}/" in str(path)} <= kept


def test_it_goes_on_from_the_newest_whole_checkpoint_with_the_same_bits(run, finished, capfd):
    DAMAGE["a data file that was cut"](run)
    said = ran(capfd, run, "--steps", "4", "--skip-damaged")
    assert lives.first_step(said) == 2 and f"{run}/4 is damaged (" in said
    assert lives.same_bits(lives.arrays(run, 4), lives.arrays(finished, 4)) == []
    assert lives.metrics(run) == lives.metrics(finished)
    assert "nothing left to do" in ran(capfd, run, "--steps", "4", "--skip-damaged")


def test_no_whole_checkpoint_is_no_reason_to_begin_anew(run, capfd):
    for step in (2, 4):
        empty(run / str(step))
    before = sorted(run.rglob("*"))
    said = sentence(ran(capfd, run, "--steps", "5", "--skip-damaged", status=train.REFUSED))
    assert said.startswith(f"no checkpoint in {run} is whole (")
    assert sorted(run.rglob("*")) == before


def test_an_older_damaged_checkpoint_is_not_in_the_way(run, capfd):
    """What a kill leaves of one that was about to be deleted."""
    empty(run / "2")
    assert lives.first_step(ran(capfd, run, "--steps", "5")) == 4


LOADS_ALONE = """
import sys
sys.path.insert(0, {examples!r})
import checkpoints, jax, train
load = checkpoints.ocp.training.Checkpointer.load
def fail(self, *arguments, **options):
    if jax.process_index() == 1:
        raise OSError(5, "Input/output error")
    return load(self, *arguments, **options)
checkpoints.ocp.training.Checkpointer.load = fail
with train.quiet_libraries():
    train.leave(train.main())
"""


def test_a_load_that_fails_on_one_process_ends_both(run, tmp_path):
    """The other one waits for it, at a barrier in Orbax."""
    program = tmp_path / "program.py"
    program.write_text(LOADS_ALONE.format(examples=str(lives.ROOT / "examples")))
    more = [*BASE, "--steps", 8]
    with lives.together(run, 2, *more, devices=1, program=[program]) as processes:
        for process, who in zip(processes, ("process 1: ", "")):
            said = sentence(lives.ended(process, train.REFUSED, limit=200))
            assert said.startswith(f"{who}{run}/4 is damaged (Input/output error)")
    assert not (run / "run.lock").exists()


# ---- Ctrl-C ------------------------------------------------------------------------------------


def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path):
    run, more = tmp_path / "run", ["--strategy", "fsdp", "--log-every", 1, "--steps", 1_000]
    process = lives.started(run, *more, devices=1)
    lives.wait_until(lambda: lives.last_step(run) >= 3, process)
    process.send_signal(signal.SIGINT)
    said = lives.ended(process, train.INTERRUPTED)
    [step] = lives.complete(run)
    assert f"stopped by Ctrl-C; step {step} is saved" in said and "Traceback" not in said
    assert lives.last_step(run) == step and not (run / "run.lock").exists()
    more[-1] = step + 1
    assert lives.first_step(lives.train(run, *more, devices=1)) == step


def test_ctrl_c_of_one_process_stops_both_after_the_same_step(tmp_path):
    run, more = tmp_path / "run", ["--strategy", "fsdp", "--log-every", 1, "--steps", 100_000]
    with lives.together(run, 2, *more, devices=1) as processes:
        lives.wait_until(lambda: lives.last_step(run) >= 3, processes[0])
        processes[1].send_signal(signal.SIGINT)
        lives.ended(processes[1], train.INTERRUPTED)
        said = lives.ended(processes[0], train.STOPPED)
    [step] = lives.complete(run)
    assert f"stopped by SIGTERM; step {step} is saved" in said


def test_a_second_ctrl_c_ends_at_once(monkeypatch):
    handler = signal.getsignal(signal.SIGINT)
    stop = endings.StopRequests()
    try:
        assert not stop.after(1)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.after(1) and signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    finally:
        stop.restore()
    assert signal.getsignal(signal.SIGINT) == handler


# ---- advice on a resume ------------------------------------------------------------------------


def test_advice_on_a_resume_leaves_the_batch_as_it_is(tmp_path, capfd):
    """A batch of 63 was fine for one row of devices; --batch 56 would be another run's."""
    run, tensor = tmp_path / "run", ["--strategy", "tensor"]
    ran(capfd, run, "--batch", "63", "--steps", "1", small=tensor)
    said = sentence(ran(capfd, run, "--batch", "63", status=train.REFUSED))
    assert "use --batch" not in said and "start it on 1 device, " in said
    assert "or start over, in other --checkpoints, with --batch 56 or 64" in said
    said = sentence(ran(capfd, run, "--batch", "64", status=train.REFUSED))
    assert "is of a run with --batch 63 (now 64): give the same, on 1 device, to go on" in said
