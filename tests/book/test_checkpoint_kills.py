"""Chapter 5's loop, which "Kill a training run" kills, is killed often here and must lose nothing.

The program trains with `many_devices.checkpoints.train_until`, which chapter 5 shows. It runs in
processes that get SIGKILL, often while they save. In the end the run must have exactly the state of one
that was never killed. Wrong ways to restart are planted, to see that this test can fail.

Ten kills, two minutes on two cores; every night twenty-four. `pytest -m "not kills"` leaves it out.
"""

import concurrent.futures
import inspect
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from many_devices import checkpoints

pytestmark = pytest.mark.kills

LAST = 40  # steps of training; every second one is saved
KILLS = int(os.environ.get("CHECKPOINT_KILLS", "5"))  # in each of two runs; every night, twelve
WHILE_SAVING = KILLS - 2 * (KILLS // 5)  # of these, aimed at a save
SEED = 5

CACHE = tempfile.TemporaryDirectory()  # of compiled programs, for all processes
PROGRAM = """
import sys
from pathlib import Path
import jax
from flax import nnx
from many_devices import checkpoints
from many_devices.checkpoints import *

{replaced}

folder, last = Path(sys.argv[1]), int(sys.argv[2])
checkpoints.train_until(last, folder, mesh_of(2, 4))
print("done", flush=True)
"""
COMPARE = """
import sys
import jax
import numpy as np
from flax import nnx
from many_devices.checkpoints import mesh_of, restore

def bits(leaf):
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()

one, two = (jax.tree.leaves(nnx.state(restore(path, mesh_of(2, 4)))) for path in sys.argv[1:])
print(len(one) > 20 and list(map(bits, one)) == list(map(bits, two)))
"""
# Restarts that people write: the newest directory, whatever its name; a new optimizer; new moments.
WRONG = {
    "newest directory": """
def start(saver, mesh):
    newest = max(saver.directory.iterdir(), key=lambda path: int(path.name.split(".")[0]))
    return restore(newest, mesh)
""",
    "fresh optimizer": """
def start(saver, mesh):
    model, _ = restore(saver.directory / str(saver.latest.step), mesh)
    with jax.set_mesh(mesh):
        return model, jax.jit(make_run)()[1]
""",
    "fresh moments": """
def start(saver, mesh):
    model, optimizer = restore(saver.directory / str(saver.latest.step), mesh)
    with jax.set_mesh(mesh):
        fresh = jax.jit(make_run)()[1]
    fresh.step.set_value(optimizer.step[...])
    return model, fresh
""",
}


def program(path, start=""):
    """Write the program; with another `start`, which finds what the kill left on disk."""
    if start:
        right = inspect.getsource(checkpoints.open_series)
        left = right.replace("cleanup_tmp_directories=True", "cleanup_tmp_directories=False")
        assert left != right
        start += f"\n{left}\ncheckpoints.start, checkpoints.open_series = start, open_series"
    path.write_text(PROGRAM.format(replaced=start))
    return path


def command(script, *arguments):
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "JAX_COMPILATION_CACHE_DIR": CACHE.name,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    environment.pop("XLA_FLAGS", None)
    return dict(
        args=[sys.executable, str(script), *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def complete(folder):
    """Steps whose directory has its final name, in order."""
    steps = [int(path.name) for path in folder.iterdir() if path.name.isdigit()]
    return sorted(steps)


def step(path):
    return int(path.name.split(".")[0])


def temporary(folder):
    return {path for path in folder.glob("*.orbax-checkpoint-tmp") if path.is_dir()}


def live(script, folder, when=None, pause=0.0, saves=0):
    """Start the program and kill it: {"first", "torn", "ended", "error"}.

    when: "starting", "training" or "saving"; None lets it end. pause: seconds to wait after that
    point was reached; saves: how many to let through before. torn: the names of the temporary
    directories that it left.
    """
    process = subprocess.Popen(**command(script, folder, LAST))
    first = None
    try:
        if when != "starting":
            words = process.stdout.readline().split()  # "starts with step 0"
            first = int(words[-1]) if words else None
        if when == "saving":
            # Leftovers were swept away before the first line was printed: what is there is new.
            past = (first or 0) + 2 * saves
            while process.poll() is None and not any(
                step(path) > past for path in temporary(folder)
            ):
                time.sleep(0.0005)
        if when:
            time.sleep(pause)
            process.kill()
        out, error = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    ended = "done" in out
    torn = set() if when == "starting" else temporary(folder)
    return {"first": first, "torn": {path.name for path in torn}, "ended": ended, "error": error}


def kill_often(script, folder, seed):
    """KILLS lives, then one that ends: a record of each. The last torn run is copied beside it."""
    keep = folder.with_name(f"torn{seed}")
    rng = random.Random(seed)
    plan = ["saving"] * WHILE_SAVING + ["training", "starting"] * (KILLS // 5)
    assert len(plan) == KILLS
    rng.shuffle(plan)
    records = []
    for when in plan:
        before = complete(folder) if folder.exists() else []
        pause = {
            "saving": rng.choice([0, 0, 0.01, 0.03]),
            "training": rng.uniform(0, 0.8),
            "starting": rng.uniform(0.5, 4),
        }[when]
        record = live(script, folder, when, pause, rng.randrange(3))
        record |= {"when": when, "before": before}
        records.append(record)
        if record["torn"] and complete(folder):
            shutil.rmtree(keep, ignore_errors=True)
            shutil.copytree(folder, keep)
        if record["ended"]:
            break  # a slow machine let it finish: nothing is left to kill
    before = complete(folder)
    return [*records, live(script, folder) | {"when": None, "before": before}]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs that are killed often, one that is never killed, a torn run, and the program."""
    root = tmp_path_factory.mktemp("kills")
    script = program(root / "train.py")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        never = pool.submit(live, script, root / "never")
        killed = [
            pool.submit(kill_often, script, root / f"killed{seed}", seed)
            for seed in (SEED, SEED + 1)
        ]
        never, killed = never.result(), [one.result() for one in killed]
    assert never["ended"], never["error"]
    return {"root": root, "torn": root / f"torn{SEED}", "killed": killed}


def equal(root, one, two):
    """Whether step 40 of two runs has the same bits."""
    script = root / "compare.py"
    script.write_text(COMPARE)
    result = subprocess.run(**command(script, one / str(LAST), two / str(LAST)), check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip() == "True"


def test_killed_often_enough(runs):
    kills = [record for killed in runs["killed"] for record in killed if record["when"]]
    torn = [record for record in kills if record["torn"]]
    print(f"{len(kills)} kills, {len(torn)} of them with a temporary directory on disk")
    assert len(kills) >= 2 * KILLS - 4
    assert len(torn) >= KILLS // 2 + 1, "too few kills hit a save: the write is faster than the aim"


def test_each_life_begins_at_the_newest_complete_step(runs):
    for killed in runs["killed"]:
        for record in killed:
            if record["first"] is not None:
                assert record["first"] == max(record["before"], default=0), record


def test_killed_runs_end_with_the_state_of_one_never_killed(runs):
    for seed in (SEED, SEED + 1):
        assert runs["killed"][seed - SEED][-1]["ended"], runs["killed"][seed - SEED][-1]["error"]
        assert equal(runs["root"], runs["root"] / "never", runs["root"] / f"killed{seed}")


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_restart_is_caught(runs, wrong, tmp_path):
    assert runs["torn"].exists(), "no kill left a temporary directory beside a complete step"
    folder = shutil.copytree(runs["torn"], tmp_path / "run")
    assert max(map(step, temporary(folder))) > complete(folder)[-1]
    record = live(program(tmp_path / "train.py", WRONG[wrong]), folder)
    if record["ended"]:
        assert not equal(tmp_path, runs["root"] / "never", folder)
    else:
        expected = "InvalidLayoutError|KeyError|ValueError|StepAlreadyExistsError"
        assert re.search(expected, record["error"])


def test_the_chapters_restart_survives_the_same_torn_run(runs, tmp_path):
    folder = shutil.copytree(runs["torn"], tmp_path / "run")
    record = live(Path(runs["root"] / "train.py"), folder)
    assert record["ended"], record["error"]
    assert record["first"] == complete(runs["torn"])[-1]
    assert equal(tmp_path, runs["root"] / "never", folder)


FULL = """
import sys, numpy as np
from orbax.checkpoint import v1 as ocp

little, much = {"w": np.arange(8.0)}, {"w": np.random.default_rng(0).random(1 << 21)}  # 16 MB
with ocp.training.Checkpointer(sys.argv[1]) as saver:
    saver.save(0, little)
try:
    with ocp.training.Checkpointer(sys.argv[1]) as saver:
        saver.save(1, much)
except Exception as error:
    print(error)
with ocp.training.Checkpointer(sys.argv[1]) as saver:
    print(saver.latest.step, saver.load()["w"].sum())
"""


def test_a_full_disk_leaves_the_last_complete_step(tmp_path):
    """As `full_disk.py`, which limits the size of files, but with a file system of 8 MB."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "full.py").write_text(FULL)
    mount = f"mount -t tmpfs -o size=8m none {tmp_path}/disk"
    if (
        not shutil.which("unshare")
        or subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode
    ):
        pytest.skip("no small file system can be mounted here: unshare is missing or not allowed")
    inner = f'{mount} && exec "$0" {tmp_path}/full.py {tmp_path}/disk'
    call = command(tmp_path / "full.py")
    result = subprocess.run(
        **{**call, "args": ["unshare", "-rm", "sh", "-c", inner, sys.executable]}
    )
    assert "No space left on device" in result.stdout, result.stderr
    assert result.stdout.strip().endswith("0 28.0")
