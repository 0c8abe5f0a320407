"""ray_train.py with two workers on this machine: they meet, train and save, or refuse."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

LAUNCH = Path(__file__).parents[1]
MOST = 400  # seconds; Ray alone needs a minute to start on a small machine


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def launched(folder, *arguments, program="ray_train.py"):
    """The exit status and all output of the launcher. Ray's processes end with it."""
    command = [
        sys.executable, LAUNCH / program, "--workers", "2", "--cpu-devices", "4",
        "--coordinator", f"127.0.0.1:{free_port()}", "--storage", folder / "ray",
        "--restarts", "0", "--", "--checkpoints", folder / "run", "--steps", "6",
        "--save-every", "3", "--log-every", "1", "--strategy", "fsdp", *arguments,
    ]  # fmt: skip
    settings = {**os.environ, "RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(
        [str(word) for word in command], env=settings, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=MOST)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    return process.returncode, said


def test_two_workers_train_one_run(tmp_path):
    status, said = launched(tmp_path)
    assert status == 0, said[-4000:]
    assert (tmp_path / "run" / "6").is_dir()
    log = (tmp_path / "run-logs" / "train.log").read_text()
    assert "fsdp on 8 devices of cpu (fsdp 8) in 2 processes" in log and "finished: step 6" in log


def test_a_machine_that_was_not_asked_for_is_refused(tmp_path):
    status, said = launched(tmp_path, "--devices", "16")
    assert status != 0 and not (tmp_path / "run").exists(), said[-4000:]
    assert "asked for 2 processes with 16 devices together, found 2 with 8" in said
