"""The parts of examples/train.py: meshes and advice, settings, metrics, clock, compilation alone.

In this process, on its eight simulated devices.
"""

import argparse
import csv
import itertools
import re
import sys
import time
import types

import jax
import jax.numpy as jnp
import lives
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

import checkpoints
import endings
import options
import reporting
import strategies
import train
from strategies import Refused

# ---- meshes ------------------------------------------------------------------------------------


class Gpu:
    """What `make_mesh` asks of one of sixteen GPUs in two servers."""

    platform, device_kind = "gpu", "NVIDIA H100 80GB HBM3"

    def __init__(self, number):
        self.id, self.slice_index, self.process_index = number, number // 8, number // 8


def no_splits(*_):
    return []


@pytest.mark.parametrize("name, asked, sizes", [
    ("fsdp-tensor", {"fsdp": 2}, (1, 2, 8)), ("fsdp-tensor", {}, (1, 4, 4)),
    ("fsdp", {}, (1, 16, 1)), ("hsdp", {}, (2, 8, 1)), ("tensor", {"model": 8}, (2, 1, 8)),
])  # fmt: skip
def test_two_servers_share_the_outermost_axis_alone(monkeypatch, name, asked, sizes):
    """`jax.make_mesh` refuses them."""
    gpus = [Gpu(number) for number in range(16)]
    monkeypatch.setattr(jax, "devices", lambda: gpus)
    mesh = strategies.make_mesh(name, asked, no_splits, gpus)
    assert (mesh.axis_names, mesh.devices.shape) == (strategies.AXES, sizes)
    assert sorted(gpu.id for gpu in mesh.devices.flat) == list(range(16))
    for row in mesh.devices.reshape(-1, sizes[2]):
        assert len({gpu.slice_index for gpu in row}) == 1, "model crosses servers"


def test_a_mesh_whose_tensor_axis_would_cross_servers_is_refused():
    gpus = [Gpu(number) for number in range(16)]
    with pytest.raises(ValueError, match="multi-slice"):
        jax.make_mesh((1, 4, 4), strategies.AXES, devices=gpus)
    with pytest.raises(Refused, match="--data 1 does not divide over 2 slices"):
        strategies.make_mesh("tensor", {}, no_splits, gpus)
    with pytest.raises(Refused, match="15 devices, and JAX sees 16: use --data 2 --model 8, --"):
        strategies.make_mesh("tensor", {"data": 3, "model": 5}, no_splits, gpus)


@pytest.mark.parametrize("count, expected", [(1, (1, 1)), (2, (1, 2)), (4, (2, 2)), (6, (2, 3)),
    (8, (2, 4)), (16, (4, 4))])  # fmt: skip
def test_default_sizes(count, expected):
    assert strategies.complete("fsdp-tensor", {}, count) == (1, *expected)
    assert strategies.complete("tensor", {}, count) == (1, 1, count)
    assert strategies.complete("fsdp", {}, count) == (1, count, 1)
    for name in ("data-parallel", "zero1"):
        assert strategies.complete(name, {}, count) == (count, 1, 1)
    if count % 2 == 0:
        assert strategies.complete("hsdp", {}, count) == (2, count // 2, 1)
        assert strategies.complete("tensor", {"data": 2}, count) == (2, 1, count // 2)
        assert strategies.complete("tensor", {"model": 2}, count) == (count // 2, 1, 2)


# ---- advice ------------------------------------------------------------------------------------


def refusal_of(name, count, asked, batch, accumulate, sizes):
    """The refusal of these settings on so many devices, or None."""
    devices = [types.SimpleNamespace() for _ in range(count)]

    def splits(name, mesh_sizes):
        return strategies.splits_of(name, mesh_sizes, sizes, batch, accumulate)

    class Mesh:
        def __init__(self, sizes, names, **_):
            self.shape, self.size = dict(zip(names, sizes)), count
            self.devices = np.array(devices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "make_mesh", Mesh)
        patch.setattr(jax, "devices", lambda: devices)
        try:
            mesh = strategies.make_mesh(name, asked, splits, devices)
            strategies.check_sizes(name, mesh, splits)
        except Refused as refusal:
            return str(refusal)
    return None


def numbers(text):
    return [int(number) for number in re.findall(r"\d+", text)]


SOME = st.sampled_from([None, 1, 2, 3, 4, 8])


@limits(deadline=None, max_examples=200)
@given(
    name=st.sampled_from([*strategies.STRATEGIES]), count=st.integers(1, 12),
    rows=st.integers(1, 40), accumulate=st.sampled_from([1, 2]), D=st.sampled_from([96, 100, 90]),
    F=st.sampled_from([384, 100]), H=st.sampled_from([8, 6]),
    asked=st.fixed_dictionaries({"data": SOME, "fsdp": SOME, "model": SOME}),
)  # fmt: skip
def test_what_a_refusal_advises_is_accepted(name, count, rows, accumulate, D, F, H, asked):
    def refusal(name=name, count=count, batch=rows * accumulate, asked=asked, **changes):
        sizes = {"D": D, "F": F, "H": H, "K": H, "V": 256} | changes
        return refusal_of(name, count, asked, batch, accumulate, sizes)

    said = refusal()
    if said is None:
        return
    advice, tried = said.partition("): ")[2] or said.partition(": ")[2], 0
    flags = re.findall(r"--(batch|D|F|H|K|V) (\d+(?: or \d+)?)", advice)
    for values in itertools.product(*(numbers(text) for _, text in flags)):
        changes = dict(zip((flag for flag, _ in flags), values))
        assert not changes or refusal(**changes) is None, (said, changes)
        tried += bool(changes)
    for text in re.findall(r"(?:--(?:data|fsdp|model) \d+ ?)+", advice):
        other = {axis: int(size) for axis, size in re.findall(r"--(\w+) (\d+)", text)}
        assert refusal(asked=other) is None, said
        tried += 1
    for text in re.findall(r"start it on ([\d, or]+) device", advice):
        for fewer in numbers(text):
            assert refusal(count=fewer, asked={}) is None, (said, fewer)
            tried += 1
    for text in re.findall(r"use --strategy ([a-z1, -]+?)(?:, or leave|$)", advice):
        for other in re.split(r", | or ", text):
            assert other in strategies.STRATEGIES, said
            tried += 1
    tried += "leave --" in advice
    assert tried, f"no advice in: {said}"


REFUSED = {
    "--data 4 --model 4 --strategy tensor": "is 16 devices, and JAX sees only 8",
    "--data 2 --model 2 --strategy tensor": "is 4 devices, and JAX sees 8: use --data 1 --model 8, --data 2",
    "--fsdp 3": "--fsdp 3 is 3 devices, and JAX sees 8: use --fsdp 8",
    "--model 2 --strategy zero1": "zero1 splits nothing over `model`.*use --strategy tensor or fsdp-tensor, or leave --model out",
    "--batch 60": "--batch 60 does not divide over 8 devices .strategy fsdp, --fsdp 8.*use --batch 56 or 64",
    "--batch 8 --accumulate 2": "--batch 8 does not divide over 2 microbatches on 8 devices .*use --batch 16,",
    "--D 36": "--D 36 does not divide over the 8 devices of the axis `fsdp`.*use --D 32 or 40",
    "--F 100 --strategy tensor": "--F 100 does not divide over the 8 devices of the axis `model`",
    "--K 4 --strategy tensor": "--K 4 does not divide .*or use --data 2 --model 4",
    "--checkpoints gs://bucket/run": "gs://bucket/run is no local folder: say with --logs",
    "--text nowhere": "--text nowhere does not exist",
    "--init-from nowhere": "nowhere is not a checkpoint that can be read: it has no _CHECKPOINT_METADATA",
    "--eval-only": "tiny is not a checkpoint that can be read",
    "--tensorboard": "needs tensorboardX",
    "--config nowhere.toml": "--config nowhere.toml is not a file: give one, or 8B or tiny",
    "--compile-only --topology v5e:2x4": "--topology v5e:2x4 cannot be described",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_settings_that_cannot_work_are_refused_in_a_sentence(
    tmp_path, monkeypatch, capsys, arguments
):
    monkeypatch.chdir(tmp_path)
    small = [str(word) for word in lives.SMALL]
    assert train.main([*small, *arguments.split()]) == train.REFUSED == 2
    said = capsys.readouterr().err
    assert said.startswith("train.py: ") and said.count("\n") == 1
    assert re.search(REFUSED[arguments], said), said
    assert not list(tmp_path.iterdir()), "nothing may be written"


@pytest.mark.parametrize("arguments", ["--strategy fdsp", "--batch 0", "--steps many", "--C 3",
    "--H 6 --K 4", "--batch 9 --accumulate 2", "--topology v5e:2x4", "--stratgey fsdp", "--clip -1"])  # fmt: skip
def test_arguments_that_are_none_are_refused_in_a_line(capsys, arguments):
    with pytest.raises(SystemExit) as status:
        train.main(arguments.split())
    said = capsys.readouterr().err
    assert status.value.code == train.REFUSED
    assert arguments.split()[0] in said and said.count("\n") == 1


# ---- settings ----------------------------------------------------------------------------------


def test_flags_count_more_than_the_file_and_the_file_more_than_defaults(tmp_path):
    path = tmp_path / "mine.toml"
    tiny = (options.HERE / "configs" / "tiny.toml").read_text()
    path.write_text(tiny.replace("batch = 32", 'batch = 48\nstrategy = "hsdp"\nsample = 3'))
    args = options.parse(["--config", str(path), "--sample", "5"], "")
    assert (args.batch, args.strategy, args.sample) == (48, "hsdp", 5)
    assert args.checkpoints == "runs/mine"
    assert options.parse([], "").strategy == "fsdp"


@pytest.mark.parametrize("line, says", [
    ("larning_rate = 1", "has `larning_rate`, which is not a setting: is it learning_rate?"),
    ("batch = [1, 2]", "gives `batch` more than one value"),
    ("batch = ", "is not TOML that can be read"), ('config = "8B"', "has `config`"),
])  # fmt: skip
def test_a_file_of_settings_that_is_wrong_is_refused_in_a_sentence(tmp_path, capsys, line, says):
    (tmp_path / "mine.toml").write_text(line)
    assert train.main(["--config", str(tmp_path / "mine.toml")]) == train.REFUSED
    said = capsys.readouterr().err
    assert f"train.py: {tmp_path}/mine.toml" in said and says in said and said.count("\n") == 1


@pytest.mark.parametrize("name", ["tiny", "8B"])
def test_each_config_is_complete(name):
    args = options.parse(["--config", name], "")
    assert options.config_of(args).D == {"tiny": 128, "8B": 4096}[name]


def test_help_names_every_strategy_and_exit_status(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    said = capsys.readouterr().out
    for name, strategy in strategies.STRATEGIES.items():
        assert re.search(rf"^  {name} +{re.escape(strategy.says)}$", said, re.M)
    assert re.findall(r"^  (\d+)  ", said, re.M) == ["0", "1", "2", "130", "134", "143"]
    assert "TF32" in said


def test_float32_means_float32_on_accelerators_too(tmp_path, monkeypatch, capsys):
    """TPUs and GPUs would multiply in fewer bits. A CPU does not: so look at what is asked for."""

    def look(*_):
        raise Refused(f"matmuls in {jax.config.jax_default_matmul_precision}")

    monkeypatch.setattr(train.reporting, "open_log", lambda _: None)
    monkeypatch.setattr(train, "begin", look)
    small = [str(word) for word in lives.SMALL]
    assert train.main([*small, "--checkpoints", str(tmp_path / "run")]) == train.REFUSED
    assert "matmuls in float32" in capsys.readouterr().err


# ---- compiled and not run ----------------------------------------------------------------------


def test_compile_only_says_bytes_and_collectives_of_a_model_that_fits_nowhere_here(capsys):
    more = ["--strategy", "hsdp", "--compile-only", "--batch", "8", "--S", "64", "--L", "32"]
    assert train.main(["--config", "8B", *more]) == train.FINISHED
    said = capsys.readouterr().out
    weights = 8_029_995_008
    assert f"{weights:,} weights in matrices, strategy hsdp: --data 2 --fsdp 4" in said
    held = int(re.search(r"([\d,]+) bytes of weights and moments", said)[1].replace(",", ""))
    assert 12 * weights / 4 <= held < 12 * weights / 4 * 1.001
    assert re.search(r"all-gather +fsdp ", said) and re.search(r"all-reduce +data ", said)


# ---- what is written ---------------------------------------------------------------------------


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_metrics_lose_rows_that_are_taken_again_and_torn_ones(tmp_path):
    path = tmp_path / "metrics.csv"
    first = reporting.Metrics(path, 0)
    for step in range(1, 8):
        first.write({"step": step, "epoch": 0, "loss": 1 / step})
    with path.open("a") as file:
        file.write("3,0")  # killed while it wrote
    second = reporting.Metrics(path, 5)
    second.write({"step": 6, "epoch": 0, "loss": 0.5, "test_loss": 0.25})
    assert [row["step"] for row in rows_of(path)] == ["1", "2", "3", "4", "5", "6"]
    assert float(rows_of(path)[4]["loss"]) == 1 / 5, "digits are lost"
    assert rows_of(path)[-1]["test_loss"] == "0.25" and rows_of(path)[0]["test_loss"] == ""
    assert [child.name for child in tmp_path.iterdir()] == ["metrics.csv"]


def test_tensorboard_gets_the_same_numbers_where_it_is_installed(tmp_path, monkeypatch):
    written = []

    class Writer:
        def __init__(self, folder):
            self.folder = folder

        def add_scalar(self, *what):
            written.append(what)

    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=Writer))
    board = reporting.open_board(True, tmp_path)
    assert board.folder == str(tmp_path / "tensorboard")
    reporting.Metrics(tmp_path / "metrics.csv", 0, board).write({"step": 3, "loss": 0.5})
    assert written == [("loss", 0.5, 3)]
    for name in ("tensorboardX", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    assert reporting.open_board(False, tmp_path) is None
    with pytest.raises(Refused, match="needs tensorboardX"):
        reporting.open_board(True, tmp_path)


def test_other_processes_write_no_metrics(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reporting.Metrics(None, 0).write({"step": 1})
    assert not list(tmp_path.iterdir())


def test_the_mean_of_a_window_and_the_step_that_is_not_finite():
    window = reporting.Window(10)
    for loss in (1.0, 2.0, 6.0):
        window.add(jnp.array(loss), jnp.array(loss / 2))
    assert window.close() == {"loss": 3.0, "gradient_norm": 3.0}
    for loss, norm, says in [
        (np.nan, 1.0, "the loss is nan at step 15"),
        (1.0, np.inf, "the gradient's norm is inf at step 15"),
    ]:
        window = reporting.Window(13)
        for pair in ((1.0, 1.0), (loss, norm), (np.nan, np.nan)):
            window.add(*pair)
        with pytest.raises(endings.Failed, match=says):
            window.close()


def test_the_clock_counts_neither_tests_nor_saves(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = reporting.Clock(100, 2e6, "bfloat16")
    assert clock.peak is None, "nobody knows a CPU's peak"
    clock.peak, now[0] = 1e9, 50.0  # it compiled
    clock.start()
    clock.steps, now[0] = 4, 52.0
    with clock.outside():
        now[0] += 7
    assert clock.speed() == {"tokens_per_second": 200.0, "mfu": 0.4}


@pytest.mark.parametrize("kind, flops", [("NVIDIA H100 80GB HBM3", 989e12), ("TPU v5 lite", 197e12),
    ("TPU v5p", 459e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("cpu", None)])  # fmt: skip
def test_peaks_are_found_by_the_name_of_a_device(kind, flops):
    assert reporting.peak_flops(argparse.Namespace(device_kind=kind)) == flops


def test_preemption_saves_beside_the_interval(tmp_path, monkeypatch):
    """A policy that is only an interval would replace the default, which saves on preemption."""
    warned = set()
    monkeypatch.setattr(
        endings.multihost_utils, "reached_preemption_sync_point", lambda step: step in warned
    )
    with checkpoints.open_checkpoints(str(tmp_path / "run"), every=5, keep=2) as saver:
        assert [step for step in range(1, 11) if saver.should_save(step)] == [5, 10]
        warned.add(7)
        assert [step for step in range(1, 11) if saver.should_save(step)] == [5, 7, 10]
        stop = endings.StopRequests()
        stop.restore()
        assert stop.after(7) and not stop.after(8)
        for step in (5, 7, 10):
            saver.save(step, {"w": jnp.ones(4)})
        assert [found.step for found in saver.checkpoints] == [7, 10]
