"""examples/launch: the files for SLURM and ssh start the same program, which trains or refuses.

Stand-ins for `srun` and `ssh` take the place of the cluster: they start the very command of the file
once for each rank, with SLURM's variables or without, on this machine. What needs packages of its own
is checked by `.ci/run launchers`.
"""

import os
import re
import signal
import subprocess
import sys

import lives
import pytest
from lives import ROOT

import train

pytestmark = [pytest.mark.newest, pytest.mark.usefixtures("compiled_once")]  # programs alone

LAUNCH = ROOT / "examples" / "launch"
STEPS = [*lives.SMALL, "--steps", "4", "--log-every", "1"]

SRUN = """#!/bin/bash
# As srun does: the options first, then the command, once for each task, with the task's variables.
while [[ $1 == --* ]]; do shift; done
pids=()
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=0 "$@" & pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit $status
"""

SSH = """#!/bin/bash
# As ssh does: options, the host, one string for the shell of that host.
while [[ $1 == -* ]]; do shift; done
shift
exec bash -c "$*"
"""


def script_of(name):
    return (LAUNCH / name).read_text()


def batch_options(text):
    """The options that sbatch reads: lines of #SBATCH before the first command."""
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#SBATCH"):
            match = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?(?:\s+#.*)?", line)
            assert match, f"line {number}: sbatch does not understand {line!r}"
            assert match[1] not in found, f"line {number}: --{match[1]} a second time"
            found[match[1]] = match[2]
        elif line.strip() and not line.startswith("#"):
            break
    rest = text.splitlines()[number:]
    assert not any(line.startswith("#SBATCH") for line in rest), "#SBATCH after the first command"
    return found


def check_batch(options):
    """What the comments of the file promise."""
    assert options["ntasks-per-node"] == "1", "one task for each node"
    assert "gpus-per-task" not in options, "--gpus-per-task hides GPUs from their task"
    assert re.fullmatch(r"TERM@\d+", options["signal"]), (
        "no SIGTERM to the tasks: B: is the shell's"
    )
    assert "requeue" in options


def launched(script, folder, stand_ins, settings, *arguments, devices=4):
    """The exit status and all output of a script whose srun and ssh are ours."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in stand_ins.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    mine = lives.environment(devices) | {"JAX_COORDINATOR_BIND_ADDRESS": settings["ADDRESS"]}
    python = os.path.dirname(sys.executable)
    mine |= settings | {"PATH": f"{tools}:{python}:{os.environ['PATH']}"}
    process = subprocess.Popen(
        ["bash", str(script), *map(str, arguments)], env=mine, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=200)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return process.returncode, said


def slurm(folder, text, tasks=2, gpus=4, **more):
    """The batch script as one job of two tasks."""
    script = folder / "job.sbatch"
    script.write_text(text)
    address = lives.free_address()
    settings = {
        "ADDRESS": address, "SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": str(tasks), "SLURM_STEP_NUM_NODES": str(tasks),
        "SLURM_GPUS_ON_NODE": str(gpus), "CHECKPOINTS": str(folder / "run"),
        "JAX_COORDINATOR_PORT": address.rpartition(":")[2], **more,
    }  # fmt: skip
    return launched(script, folder, {"srun": SRUN}, settings, *STEPS)


def test_batch_script_says_what_it_promises():
    check_batch(batch_options(script_of("slurm.sbatch")))


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("#SBATCH --requeue", "#SBATCH --re queue", "does not understand"),
        ("#SBATCH --requeue", "echo\n#SBATCH --requeue", "after the first command"),
        ("--ntasks-per-node=1", "--ntasks-per-node=4", "one task for each node"),
        ("--gpus-per-node=4", "--gpus-per-task=1", "hides GPUs"),
        ("--signal=TERM@120", "--signal=B:TERM@120", "no SIGTERM to the tasks"),
    ],
)
def test_planted_mistake_in_the_batch_script_is_noticed(right, wrong, said):
    text = script_of("slurm.sbatch")
    assert right in text
    with pytest.raises(AssertionError, match=said):
        check_batch(batch_options(text.replace(right, wrong)))


def test_slurm_tasks_train_one_run(tmp_path):
    status, said = slurm(tmp_path, script_of("slurm.sbatch"))
    assert status == 0, said[-3000:]
    log = (tmp_path / "run-logs" / "train.log").read_text()
    assert "fsdp on 8 devices of cpu (fsdp 8) in 2 processes" in log and "finished: step 4" in log


def test_tasks_that_do_not_meet_refuse(tmp_path):
    """Started without srun, the program is alone."""
    text = script_of("slurm.sbatch")
    alone = re.sub(r"srun --kill-on-bad-exit=1", "env -u SLURM_STEP_NODELIST", text)
    assert alone != text
    status, said = slurm(tmp_path, alone)
    assert status == train.REFUSED and "Nothing that JAX knows has started this program" in said
    assert not (tmp_path / "run").exists()


def test_tasks_that_see_too_few_devices_refuse(tmp_path):
    status, said = slurm(tmp_path, script_of("slurm.sbatch"), gpus=8)
    assert status == train.REFUSED and "asked for 2 processes with 16 devices" in said
    assert "found 2 with 8" in said


@pytest.mark.slow
def test_ssh_starts_one_process_for_each_host(tmp_path):
    address = lives.free_address()
    settings = {"ADDRESS": address, "COORDINATOR": address, "HOSTS": "one two", "DEVICES": "8"}
    arguments = ["--strategy", "fsdp", "--checkpoints", tmp_path / "run", *STEPS]
    script = LAUNCH / "ssh.sh"
    status, said = launched(script, tmp_path, {"ssh": SSH}, settings, *arguments)
    assert status == 0, said[-3000:]
    assert "fsdp on 8 devices of cpu (fsdp 8) in 2 processes" in said and "finished: step 4" in said


def test_ssh_ends_with_the_status_of_the_first_that_fails(tmp_path):
    address = lives.free_address()
    settings = {"ADDRESS": address, "COORDINATOR": address, "HOSTS": "one two", "DEVICES": "16"}
    arguments = ["--strategy", "fsdp", "--checkpoints", tmp_path / "run", *STEPS]
    status, said = launched(LAUNCH / "ssh.sh", tmp_path, {"ssh": SSH}, settings, *arguments)
    assert status == train.REFUSED and "found 2 with 8" in said
