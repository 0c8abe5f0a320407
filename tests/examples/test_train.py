"""examples/train.py trains the same model everywhere, and goes on where it was stopped.

Each run is a process of its own, as readers start it, with 1, 2, 4 or 8 simulated devices.
"""

import os
import pty
import re
import shutil
import signal
import sys
import termios

import lives
import numpy as np
import pytest
from lives import ROOT

import model
import train

pytestmark = pytest.mark.usefixtures("compiled_once")  # programs alone

STEPS = 46  # two epochs of 23 batches; the last batch of each has 29 rows instead of 64
EVERY_STEP = ["--steps", STEPS, "--log-every", 1, "--save-every", 20]
HERE = ROOT / "tests" / "examples"
ONE_MORE = ["--strategy", "fsdp-tensor", *EVERY_STEP]

# Strategies add up the same float32 numbers in another order. That moves a sum by a few units in
# the last place (6e-8), and 46 steps carry it on. Measured: losses 3e-6, moments 6e-6.
LOSS = dict(rtol=2e-5, atol=0)
MOMENT = 1e-4  # of the largest number in the array
# AdamW divides by the root of the second moment. Where a gradient is nearly nothing, rounding
# decides its sign, and the weight goes another way: bounded by some of the distance that 46 steps
# of 1e-3 can go. Measured: 3e-5.
WEIGHT = 0.01 * STEPS * 1e-3


NUMBERS = [1, pytest.param(2, marks=pytest.mark.newest), 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def everywhere(folder):
    """Every strategy on 1, 2 or 8 devices: a function from the two to a run's folder."""
    made = set()

    def run(devices, strategy):
        if devices not in made:
            program = [HERE / "all_strategies.py"]
            lives.train(folder / str(devices), *EVERY_STEP, devices=devices, program=program)
            made.add(devices)
        return folder / str(devices) / strategy

    return run


def apart(one, two, part):
    """The largest difference of two states, over the arrays with this in their name."""
    names = [name for name in one if part in name]
    assert len(names) == 7, names  # the model has seven variables
    return {name: np.abs(one[name].astype("float64") - two[name]).max() for name in names}


# ---- one model, whatever the strategy and the number of devices --------------------------------


@pytest.mark.parametrize("devices", NUMBERS)
@pytest.mark.parametrize("strategy", model.STRATEGIES)
def test_same_losses_moments_and_weights(everywhere, devices, strategy):
    alone, run = everywhere(1, "data-parallel"), everywhere(devices, strategy)
    assert len(lives.column(run, "loss")) == STEPS
    np.testing.assert_allclose(lives.column(run, "loss"), lives.column(alone, "loss"), **LOSS)
    for name in ("test_loss", "test_accuracy"):
        assert len(lives.column(run, name)) == 2
        np.testing.assert_allclose(lives.column(run, name), lives.column(alone, name), **LOSS)
    theirs, ours = lives.arrays(alone, STEPS), lives.arrays(run, STEPS)
    assert max(apart(ours, theirs, "model.").values()) < WEIGHT
    for moment in ("opt_state.0.mu", "opt_state.0.nu"):  # these notice a gradient of a wrong scale
        for name, difference in apart(ours, theirs, moment).items():
            assert difference < MOMENT * np.abs(theirs[name]).max(), name
    keys = [name for name in ours if name.startswith("rngs.") or "count" in name or "step" in name]
    assert len(keys) == 4 and all(np.array_equal(ours[name], theirs[name]) for name in keys)


def test_it_learns(everywhere):
    accuracy = lives.column(everywhere(1, "data-parallel"), "test_accuracy")
    assert accuracy[0] < accuracy[1] and accuracy[1] > 0.95


@pytest.mark.parametrize("devices", NUMBERS)
def test_bytes_held_follow_from_the_sizes(everywhere, devices):
    """Closed forms against what the program added up from the shardings of its arrays."""
    at = model.Config()
    kernels, ends = 2 * at.L * at.D * at.F, (at.I + at.V) * at.D
    biases, leftovers = at.L * at.F, 2 * at.L * at.D  # over `model`; over nothing
    numbers = kernels + ends + biases + leftovers
    fixed = 2 * 4 + 12  # two counters of steps; a key and its counter
    split = kernels + at.I * at.D  # moments that ZeRO-1 splits: not those of w_DV, which is small
    square = {1: (1, 1), 2: (1, 2), 8: (2, 4)}[devices]
    both = (kernels + ends) // devices + biases // square[1] + leftovers
    expected = {
        "data-parallel": 3 * 4 * numbers,
        "zero1": 4 * numbers + 2 * 4 * (split // devices + numbers - split),
        "fsdp": 3 * 4 * ((kernels + ends) // devices + biases + leftovers),
        "tensor": 3 * 4 * ((kernels + ends + biases) // devices + leftovers),
        "fsdp-tensor": 3 * 4 * both,
    }
    held = {
        name: set(lives.column(everywhere(devices, name), "bytes_per_device")) for name in expected
    }
    assert held == {name: {count + fixed} for name, count in expected.items()}


def test_bfloat16_computes_and_float32_remembers(folder, everywhere):
    run, exact = folder / "bfloat16", everywhere(8, "data-parallel")
    lives.train(run, "--precision", "bfloat16", "--strategy", "fsdp", "--remat", *EVERY_STEP)
    ours, theirs = lives.column(run, "loss"), lives.column(exact, "loss")
    # bfloat16 has 8 bits: products are off by 4e-3, and 46 steps carry that on. Measured: 0.015.
    assert 1e-4 < np.abs(ours - theirs).max() < 0.05
    saved = lives.arrays(run, STEPS)
    floats = {str(array.dtype) for array in saved.values() if array.dtype.kind not in "iu"}
    assert floats == {"float32"}, "masters and moments must not be rounded"
    rounded = saved["model.w_ID.value/"].view("uint32") & 0xFFFF
    assert np.any(rounded), "the weights have only bits that bfloat16 has as well"


# ---- stopped, and started again ----------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(folder):
    """A run that SIGTERM stopped, and how far it came."""
    run = folder / "stopped"
    process = lives.started(run, *ONE_MORE)
    lives.wait_until(lambda: lives.last_step(run) >= 23, process)  # in the second epoch
    process.send_signal(signal.SIGTERM)
    said = lives.ended(process, status=train.STOPPED)
    return run, said


def test_sigterm_saves_the_step_that_was_reached(stopped):
    run, said = stopped
    assert train.STOPPED == 143 and f"  {train.STOPPED}  stopped by SIGTERM" in usage()
    reached = lives.last_step(run)
    assert 23 <= reached < STEPS
    assert lives.complete(run)[-1] == reached and not lives.torn(run)
    assert f"stopped by SIGTERM; step {reached} is saved" in said


def resumed(stopped, folder, name, *arguments, **options):
    """A copy of the stopped run, continued to the end. Returns its folder."""
    run, reached = folder / name, lives.last_step(stopped[0])
    shutil.copytree(stopped[0], run)
    shutil.copytree(f"{stopped[0]}-logs", f"{run}-logs")
    shutil.copytree(run / str(reached), run / f"{reached + 1}.orbax-checkpoint-tmp")  # torn, newer
    said = lives.train(run, *arguments, **options)
    assert lives.first_step(said) == reached and not lives.torn(run)
    return run


def test_the_same_mesh_goes_on_with_the_same_bits(stopped, folder, everywhere):
    run, never = resumed(stopped, folder, "resumed", *ONE_MORE), everywhere(8, "fsdp-tensor")
    assert lives.same_bits(lives.arrays(run, STEPS), lives.arrays(never, STEPS)) == []
    assert lives.metrics(run) == lives.metrics(never)
    assert [int(row["step"]) for row in lives.metrics(run)] == [*range(1, STEPS + 1)]
    assert len(lives.complete(run)) == 3  # --keep


WRONG = {
    "new moments": "run = run._replace(optimizer=jax.jit(make)().optimizer)",
    "new keys": "run = run._replace(rngs=jax.jit(make)().rngs)",
    "data from the start": "position = train.Position()",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_restart_is_noticed(stopped, folder, everywhere, wrong):
    """What people forget to restore: the comparison above must not pass with it."""
    program = folder / f"{wrong.replace(' ', '_')}.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'examples')!r})\nimport jax, train\n"
        "right = train.begin\n"
        "def begin(saver, make, mesh):\n"
        "    run, places, step, position = right(saver, make, mesh)\n"
        f"    {WRONG[wrong]}\n"
        "    return run, places, step, position\n"
        "train.begin = begin\nsys.exit(train.main())\n"
    )
    run = resumed(stopped, folder, program.stem, *ONE_MORE, program=[program])
    never = everywhere(8, "fsdp-tensor")
    assert lives.same_bits(lives.arrays(run, STEPS), lives.arrays(never, STEPS))
    assert lives.metrics(run) != lives.metrics(never)


def test_other_meshes_go_on_to_rounding(folder, everywhere):
    """Eight devices, then four, then one, each with another strategy."""
    run = folder / "elastic"
    lives.train(run, "--strategy", "fsdp-tensor", *EVERY_STEP[2:], "--steps", 15, devices=8)
    four = ["--strategy", "zero1", "--cpu-devices", 4]  # counts more than the environment
    said = lives.train(run, *four, *EVERY_STEP[2:], "--steps", 30, devices=1)
    assert lives.first_step(said) == 15 and "zero1 on 4 x 1 cpu devices" in said
    said = lives.train(run, "--strategy", "data-parallel", *EVERY_STEP, devices=1)
    assert lives.first_step(said) == 30
    never = everywhere(8, "fsdp-tensor")
    np.testing.assert_allclose(lives.column(run, "loss"), lives.column(never, "loss"), **LOSS)
    held = lives.column(run, "bytes_per_device")
    assert len(set(held[:15])) == len(set(held[15:30])) == len(set(held[30:])) == 1
    assert held[0] < held[15] < held[30]


@pytest.mark.newest
def test_a_finished_run_has_nothing_left_to_do_and_can_be_lengthened(folder, everywhere):
    run = folder / "longer"
    shutil.copytree(everywhere(1, "fsdp"), run)
    shutil.copytree(f"{everywhere(1, 'fsdp')}-logs", f"{run}-logs")
    before = lives.arrays(run, STEPS)
    said = lives.train(run, *EVERY_STEP, devices=1)
    assert f"nothing left to do: step {STEPS} is saved in {run}" in said
    said = lives.train(run, "--steps", 10, devices=1)
    assert f"nothing left to do: step {STEPS} is saved in {run}, and 10 were asked for" in said
    assert "going on" not in said and "finished" not in said
    assert lives.same_bits(lives.arrays(run, STEPS), before) == []
    assert lives.complete(run)[-1] == STEPS and len(lives.metrics(run)) == STEPS
    lives.train(run, *EVERY_STEP[2:], "--steps", STEPS + 2, devices=1)
    assert [int(row["step"]) for row in lives.metrics(run)] == [*range(1, STEPS + 3)]


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(folder, everywhere):
    run = folder / "damaged"
    shutil.copytree(everywhere(1, "data-parallel"), run)
    largest = max((run / str(STEPS)).rglob("*"), key=lambda path: path.stat().st_size)
    os.truncate(largest, 1000)
    said = lives.train(run, *EVERY_STEP, devices=1, status=train.REFUSED)
    assert said.startswith(f"train.py: {run}/{STEPS} is damaged") and said.count("\n") == 1
    assert "move it away" in said
    shutil.rmtree(run / str(STEPS))
    assert lives.first_step(lives.train(run, *EVERY_STEP, devices=1)) == 40


@pytest.mark.newest
def test_a_loss_that_is_not_finite_is_not_saved(folder):
    said = lives.train(folder / "nan", "--learning-rate", 1e30, *EVERY_STEP, devices=1, status=1)
    assert re.search(r"the loss is (nan|inf) at step \d+, which was not saved", said)
    assert "Traceback" not in said and lives.complete(folder / "nan") == []


# ---- several processes -------------------------------------------------------------------------


@pytest.mark.newest
def test_two_processes_are_the_same_program(folder, everywhere):
    run = folder / "two"
    with lives.together(run, 2, *ONE_MORE) as processes:
        first, second = (lives.ended(process) for process in processes)
    assert f"finished: step {STEPS} is saved" in first and "finished" not in second
    assert "on 2 x 4 cpu devices of 2 processes" in first
    never = everywhere(8, "fsdp-tensor")
    np.testing.assert_allclose(lives.column(run, "loss"), lives.column(never, "loss"), **LOSS)
    assert [int(row["step"]) for row in lives.metrics(run)] == [*range(1, STEPS + 1)]


@pytest.mark.newest
def test_a_machine_that_was_not_asked_for_is_refused(folder):
    said = lives.train(folder / "alone", "--devices", 8, devices=4, status=train.REFUSED)
    assert "asked for 1 process with 8 devices together, found 1 with 4" in said
    said = lives.train(folder / "alone", "--processes", 2, devices=4, status=train.REFUSED)
    assert "Nothing that JAX knows has started this program" in said and "Traceback" not in said
    with lives.together(folder / "alone", 2, "--devices", 16) as processes:
        for process in processes:
            assert "asked for 2 processes with 16 devices together, found 2 with 8" in lives.ended(
                process, train.REFUSED
            )
    assert not (folder / "alone").exists()


@pytest.mark.newest
def test_a_watchdog_ends_a_step_that_hangs_and_says_where(folder):
    """Process 1 is stopped, not killed: it still has its connections, and answers nothing."""
    run = folder / "hangs"
    more = ["--watchdog", 15, "--strategy", "fsdp", "--steps", 100_000, "--log-every", 1]
    with lives.together(run, 2, *more) as processes:
        assert lives.wait_until(lambda: lives.last_step(run) > 3, processes[0])
        processes[1].send_signal(signal.SIGSTOP)
        said = lives.ended(processes[0], 1, limit=60)
    assert "Timeout (0:00:15)!" in said and re.search(r"train\.py\", line \d+ in train", said)


# ---- what is said ------------------------------------------------------------------------------


def usage():
    parser_said = lives.subprocess.run(
        [sys.executable, lives.TRAIN, "--help"], capture_output=True, text=True, check=True
    )
    return parser_said.stdout


@pytest.mark.newest
def test_help_names_every_strategy_and_exit_status():
    said = usage()
    for name, strategy in model.STRATEGIES.items():
        assert re.search(rf"^  {name} +{re.escape(strategy.says)}$", said, re.M)
    assert re.findall(r"^  (\d+)  ", said, re.M) == ["0", "1", "2", "130", "134", "143"]


@pytest.mark.newest
def test_the_progress_bar_shows_loss_speed_and_bytes(folder):
    """On a terminal, which a pseudo-terminal is; elsewhere there are lines of the log."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    process = lives.started(folder / "bar", "--steps", 12, devices=2, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 10_000):
            shown += part
    except OSError:  # how Linux says that the other end is closed
        pass
    assert process.wait(60) == 0
    bars = re.findall(
        r"\| 10/12 \[.* loss (0\.\d+), [\d,]+ images/s, 3\.66 MB per device\]", shown.decode()
    )
    assert bars, shown


REFUSED = {
    "--data 4 --model 4 --strategy tensor": "is 16 devices, and JAX sees only 8",
    "--data 2 --model 2 --strategy tensor": "is 4 devices, and JAX sees 8: use --data 8 --model 1, --data 4 --model 2, ",
    "--data 3": "--data 3 times --model 2 is 6 devices, and JAX sees 8",
    "--model 2 --strategy zero1": "--strategy zero1 splits nothing over `model`.*use --strategy tensor or fsdp-tensor",
    "--batch 60": "--batch 60 does not divide over the 8 devices of the axis `data`.*use --batch 56 or 64",
    "--batch 4": "--batch 4 does not divide .*use --batch 8, or",
    "--D 100 --strategy fsdp": "--D 100 does not divide over the 8 devices of the axis `data`.*use --D 96 or 104",
    "--F 100 --strategy zero1": "--F 100 does not divide over the 8 devices of the axis `data`",
    "--F 100 --strategy tensor": "--F 100 does not divide over the 8 devices of the axis `model`",
    "--checkpoints gs://bucket/run": "gs://bucket/run is no local folder: say with --logs",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_settings_that_cannot_work_are_refused_in_a_sentence(
    tmp_path, monkeypatch, capsys, arguments
):
    monkeypatch.chdir(tmp_path)
    assert train.main(arguments.split()) == train.REFUSED == 2
    said = capsys.readouterr().err
    assert said.startswith("train.py: ") and said.count("\n") == 1
    assert re.search(REFUSED[arguments], said), said
    assert not list(tmp_path.iterdir()), "nothing may be written"


@pytest.mark.parametrize("arguments", ["--strategy fdsp", "--batch 0", "--steps many"])
def test_arguments_that_are_none_are_refused(capsys, arguments):
    with pytest.raises(SystemExit) as status:
        train.main(arguments.split())
    assert status.value.code == train.REFUSED
    assert "train" not in arguments and arguments.split()[1] in capsys.readouterr().err


@pytest.mark.parametrize("flag, there", [("--D 128", "--D 96"), ("--batch 32", "--batch 64"),
    ("--seed 5", "--seed 0"), ("--learning-rate 0.1", "--learning-rate 0.001"),
    ("--precision bfloat16", "--precision float32")])  # fmt: skip
def test_a_directory_of_another_run_is_refused(everywhere, capsys, flag, there):
    run = everywhere(8, "fsdp")
    before = sorted(run.rglob("*"))
    assert train.main(["--checkpoints", str(run), *flag.split()]) == train.REFUSED
    said = capsys.readouterr().err
    assert f"{run}/{STEPS} is of a run with {there} (now {flag.split()[1]})" in said
    assert sorted(run.rglob("*")) == before


def test_a_checkpoint_of_another_program_is_refused(tmp_path, capsys):
    with train.ocp.training.Checkpointer(tmp_path / "theirs") as saver:
        saver.save(7, {"w": np.ones(4)})
    assert train.main(["--checkpoints", str(tmp_path / "theirs")]) == train.REFUSED
    assert "theirs/7 was not written by this program" in capsys.readouterr().err
