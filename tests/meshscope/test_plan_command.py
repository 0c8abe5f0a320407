"""`python -m meshscope plan`: tables on stdout, a bar on stderr, sentences for what goes wrong."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

STEP = """
import os, pathlib, signal, time
import jax

TABLES = {
    "DP": {"batch": "data"},
    "FSDP": {"batch": "data", "embed": "data"},
    "TP": {"embed": "data"},
}

def step(mesh, rules):
    here(rules)
    def shape(*names):
        sharding = jax.NamedSharding(mesh, jax.P(*(rules.get(name) for name in names)))
        return jax.ShapeDtypeStruct((64, 64), "float32", sharding=sharding)
    def train_step(w, x):
        return w - 0.1 * jax.grad(lambda w: (x @ w).mean())(w)
    w, x = shape("embed", None), shape("batch", None)
    print("a line of the file's own")
    return jax.jit(train_step, donate_argnums=0, out_shardings=w.sharding).trace(w, x)

def here(rules):
    pass
"""
PLAIN_ENVIRONMENT = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=3"}


def command(*arguments):
    return [sys.executable, "-m", "meshscope", *map(str, arguments)]


def run(*arguments, cwd):
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=PLAIN_ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=180,
    )


def plan(folder, *more):
    return run("plan", "mine.py", "--devices", 8, *more, cwd=folder)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(STEP)
    return tmp_path


def test_help_lists_what_there_is(tmp_path):
    done = run("--help", cwd=tmp_path)
    assert done.returncode == 0 and re.search(r"plan +compile a training step", done.stdout)
    more = run("plan", "--help", cwd=tmp_path)
    assert "TABLES" in more.stdout and "--hbm" in more.stdout
    assert max(map(len, more.stdout.splitlines())) <= 100


def test_a_plan_is_printed_drawn_and_kept_and_made_again_without_compiling(folder):
    done = plan(folder, "--picture", "plan.svg")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Fits into 80.0 GB: 8 devices, H100\n")
    rows = re.findall(r"^\d  (DP|FSDP|TP) +data 8 ", done.stdout, re.M)
    assert sorted(rows) == ["DP", "FSDP", "TP"]
    assert "file's own" not in done.stdout and "[####################] 3/3" in done.stderr
    assert (folder / "plan.svg").read_text().startswith("<svg")
    kept = (folder / "mine.jsonl").read_bytes()
    assert kept.count(b"\n") == 3
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == [
        "mine.jsonl", "mine.py", "plan.svg",
    ]  # fmt: skip
    again = plan(folder, "--hbm", "1e3")
    assert (folder / "mine.jsonl").read_bytes() == kept
    assert again.returncode == 1 and again.stdout.startswith("Nothing fits into 0.00000100 GB")
    assert re.search(
        r"^meshscope plan: nothing fits: \w+, data 8, comes nearest", again.stderr, re.M
    )


WAITS = """
def here(rules):
    if rules.get("embed") and not rules.get("batch"):
        pathlib.Path("waits").touch()
        while not pathlib.Path("go").exists():
            time.sleep(0.05)
"""


def test_a_run_that_was_killed_goes_on_where_it_was(folder):
    (folder / "mine.py").write_text(STEP + WAITS)
    process = subprocess.Popen(
        command("plan", "mine.py", "--devices", 8),
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for(folder / "waits")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kept = (folder / "mine.jsonl").read_bytes()
    assert kept.count(b"\n") == 2
    with (folder / "mine.jsonl").open("ab") as file:
        file.write(kept[:40])  # as if killed in the middle of a line
    (folder / "go").touch()
    done = plan(folder)
    assert done.returncode == 0 and "3/3" in done.stderr
    lines = (folder / "mine.jsonl").read_bytes().split(b"\n")
    assert b"\n".join(lines[:2]) + b"\n" == kept and json.loads(lines[3])["table"] == "TP"
    assert len(lines) == 5 and lines[4] == b""


def wait_for(path):
    end = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} did not come"
        time.sleep(0.05)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_what_compiles_ends_with_the_command(folder, sent, code):
    (folder / "mine.py").write_text(
        STEP + WAITS + "\npathlib.Path('pid').write_text(str(os.getpid()))\n"
    )
    process = subprocess.Popen(
        command("plan", "mine.py", "--devices", 8),
        cwd=folder,
        stderr=subprocess.DEVNULL,
        # A shell that starts these tests in the background lets their processes ignore SIGINT.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    wait_for(folder / "waits")
    process.send_signal(sent)
    assert process.wait(timeout=60) == code
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "pid").read_text()), 0)


ABORTS = """
lowered, which = jax.stages.Lowered, []
plain = lowered.compile

def compile(self, *args):
    if which[-1] == "data" and not pathlib.Path("batch").exists():
        os.abort()
    return plain(self, *args)

lowered.compile = compile

def here(rules):
    which.append(rules.get("embed") if rules.get("batch") else None)
"""


def test_a_compiler_that_ends_its_process_fails_one_candidate(folder):
    (folder / "mine.py").write_text(STEP + ABORTS)
    done = plan(folder)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"FSDP +data 8 +unknown +the process that compiled it was ended by SIGABRT", done.stdout
    )
    assert len(re.findall(r"^\d  (DP|TP) ", done.stdout, re.M)) == 2
    assert not (folder / "mine.jsonl.running").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("TABLES = {}", "mine.py defines no function step(mesh, rules): add it"),
        ("def step(mesh, rules): pass", "mine.py defines no TABLES"),
        (
            "import nothing_like_it",
            "mine.py cannot be loaded: ModuleNotFoundError: No module named",
        ),
        ("def step(:", "mine.py cannot be loaded: SyntaxError"),
        (STEP + "\nTABLES = {'none': {}}", "no table shards anything over 8 devices"),
        (STEP + "\nAXES = ('model',)", "a table names the axis 'data', and axes are model"),
    ],
)
def test_a_file_that_cannot_be_used_is_said_in_a_sentence(folder, text, says):
    (folder / "mine.py").write_text(text)
    done = plan(folder)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("meshscope plan: ") and says in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nothing.py", "--devices", 8), "there is no file nothing.py"),
        (("mine.py", "--devices", "many"), "'many' is not a number of devices: give 1 or more"),
        (("mine.py", "--devices", 8, "--hbm", "80GB"), "'80GB' is not a number of bytes"),
        (("mine.py", "--devices", 8, "--hbm", "nan"), "'nan' is not a number of bytes"),
        (("mine.py", "--devices", 8, "--chip", "abacus"), "invalid choice: 'abacus'"),
        (("mine.py", "--devices", 8, "--picture", "no/plan.svg"), "no/plan.svg cannot be written"),
        (("mine.py", "--devices", 8, "--results", "mine.py"), "mine.py, line 2, is not a result"),
        (("mine.py", "--devices", 512, "--chip", "v5e"), "512 devices are more than the 256 TPU v5e"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_used_are_said_in_a_sentence(folder, arguments, says):
    done = run("plan", *arguments, cwd=folder)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert says in done.stderr.strip().splitlines()[-1]
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == ["mine.py"]
