"""The parts of examples/train.py and examples/model.py, each against something else that knows.

In this process, on its eight simulated devices.
"""

import csv
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import checkpoints
import endings
import meshscope as ms
import model
import train

P = jax.P
SMALL = model.Config()
COMPILED = []  # what JAX hands to the compiler, by name


def note_compilation(event, seconds, fun_name="", **_):
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(fun_name)


jax.monitoring.register_event_duration_secs_listener(note_compilation)
KERNELS = {(64, 96), (96, 384), (384, 96), (96, 16)}


def build(strategy, config=SMALL, mesh=None, noise=0.1):
    """A run as shapes with shardings, its step, its mesh and a batch as a shape."""
    mesh = mesh or model.make_mesh(strategy, None, None)
    tx = optax.adamw(1e-3)

    def make():
        return model.make_run(config, strategy, tx, seed=0)

    with jax.set_mesh(mesh):
        run = nnx.merge(*nnx.get_abstract_model(make, mesh))
    places = jax.tree.map(lambda leaf: leaf.sharding, run)
    return make, run, places, train.compiled_step(places, mesh, noise), mesh


def batch_shape(mesh, size, config=SMALL):
    rows = jax.NamedSharding(mesh, P("data"))
    shapes = ((size, config.I), "float32"), ((size,), "int32"), ((size,), "float32")
    return model.Batch(*(jax.ShapeDtypeStruct(*shape, sharding=rows) for shape in shapes))


def program(strategy, size=64, config=SMALL, mesh=None):
    make, run, places, step, mesh = build(strategy, config, mesh)
    with jax.set_mesh(mesh):
        return step.lower(run, batch_shape(mesh, size, config)).compile()


# ---- the program that the compiler makes -------------------------------------------------------


@pytest.mark.parametrize("strategy", model.STRATEGIES)
def test_one_compilation_no_drift_and_donated_memory(strategy):
    make, _, places, step, mesh = build(strategy)
    digits, _ = train.load_digits()
    with jax.set_mesh(mesh):
        run = jax.jit(make, out_shardings=places)()
        first = run
        COMPILED.clear()
        for _ in range(3):
            run, loss = step(run, train.on_devices(digits, np.arange(64), 64, mesh))
        assert COMPILED == ["jit(step)"]
        compiled = step.lower(run, batch_shape(mesh, 64)).compile()
    assert run.optimizer.step[...] == 3 and run.rngs.default.count[...] == 3
    for leaf, place in zip(jax.tree.leaves(run), jax.tree.leaves(places), strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first)), "nothing was donated"
    assert ms.memory(compiled).aliased == train.bytes_held(run)
    assert loss.is_fully_replicated


@pytest.mark.parametrize("strategy", model.STRATEGIES)
def test_bytes_held_are_those_of_the_shards(strategy):
    make, _, places, _, mesh = build(strategy)
    with jax.set_mesh(mesh):
        run = jax.jit(make, out_shardings=places)()
    assert train.bytes_held(run) == ms.memory(run).bytes_per_device


@pytest.mark.parametrize("size", [64, 512])
def test_fsdp_gathers_weights_and_no_activation(size):
    shapes = {
        row.shape for row in ms.collectives(program("fsdp", size)) if row.kind == "all-gather"
    }
    assert shapes == KERNELS


@pytest.mark.parametrize("strategy, rows", [("tensor", 64), ("fsdp-tensor", 32)])
@pytest.mark.parametrize("V", [16, 65536])
def test_tensor_parallelism_adds_up_activations_and_never_gathers_logits(strategy, rows, V):
    """Over `model`: two sums a layer, one for the pixels, one for the logits' gradient.

    And numbers of one row each, for the softmax over a split vocabulary.
    """
    moved = [
        (row.kind, row.shape, row.executions)
        for row in ms.collectives(program(strategy, 64, model.Config(V=V)))
        if "model" in row.axes and row.shape != (rows,)
    ]
    assert {(kind, shape) for kind, shape, _ in moved} == {("all-reduce", (rows, SMALL.D))}
    assert sum(executions for *_, executions in moved) == 2 * SMALL.L + 2


def test_remat_saves_memory_and_changes_no_loss():
    digits, _ = train.load_digits()
    losses, temporaries = [], []
    for remat in (False, True):
        make, shapes, places, step, mesh = build("fsdp", model.Config(L=2, remat=remat))
        with jax.set_mesh(mesh):
            compiled = step.lower(shapes, batch_shape(mesh, 1024)).compile()
            run = jax.jit(make, out_shardings=places)()
            _, loss = compiled(run, train.on_devices(digits, np.arange(1024), 1024, mesh))
        losses.append(float(loss))
        temporaries.append(ms.memory(compiled).temporaries)
    assert np.isclose(*losses, rtol=1e-6, atol=0)
    assert temporaries[1] < temporaries[0] / 2, temporaries


def test_zero1_splits_large_moments_along_features_and_no_small_ones():
    _, run, *_ = build("zero1")
    moments = run.optimizer.opt_state[0].mu
    found = {
        "w_DF": moments.blocks.w_DF.sharding.spec, "w_FD": moments.blocks.w_FD.sharding.spec,
        "b_F": moments.blocks.b_F.sharding.spec, "scale_D": moments.blocks.scale_D.sharding.spec,
        "w_ID": moments.w_ID.sharding.spec, "w_DV": moments.w_DV.sharding.spec,
    }  # fmt: skip
    split = {name: spec.index("data") for name, spec in found.items() if "data" in spec}
    assert split == {"w_DF": 2, "w_FD": 1, "w_ID": 1}  # never the layers
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(run.model))


# ---- numbers -----------------------------------------------------------------------------------


def test_padding_changes_neither_loss_nor_accuracy():
    """Sixteen logits and eight rows, two of them filling, against Optax on ten and six."""
    rng = np.random.default_rng(0)
    logits_BV, labels_B = rng.normal(size=(8, 16)).astype("float32"), np.arange(8) % 10
    logits_BV[:, 12] = 50.0  # beyond the classes: must not count, not even as the largest
    batch = model.Batch(logits_BV, labels_B, (np.arange(8) < 6).astype("float32"))
    loss, right, rows = model.sums_of(lambda x: x, batch)
    each = optax.softmax_cross_entropy_with_integer_labels(logits_BV[:6, :10], labels_B[:6])
    assert np.isclose(loss, each.sum(), rtol=1e-6) and rows == 6
    assert right == (logits_BV[:6, :10].argmax(-1) == labels_B[:6]).sum()
    assert np.isclose(model.loss_of(lambda x: x, batch), each.mean(), rtol=1e-6)


@pytest.mark.parametrize("size", [64, 104, 360, 512])
def test_the_test_is_exact_over_uneven_batches(size):
    make, _, places, _, mesh = build("fsdp")
    _, digits = train.load_digits()
    with jax.set_mesh(mesh):
        run = jax.jit(make, out_shardings=places)()
        loss, accuracy = train.compiled_test(digits, size, mesh)(run)
        logits = np.asarray(jax.jit(run.model)(digits.images_BI), "float64")[:, :10]
    largest = logits.max(-1)
    log_sum = largest + np.log(np.exp(logits - largest[:, None]).sum(-1))
    true = log_sum - logits[np.arange(360), digits.labels_B]
    assert np.isclose(loss, true.mean(), rtol=1e-6)
    assert accuracy == (logits.argmax(-1) == digits.labels_B).mean()


def test_bfloat16_is_what_the_matmuls_compute_in():
    config = model.Config(compute="bfloat16")
    make, run, _, step, mesh = build("fsdp", config)
    with jax.set_mesh(mesh):
        text = str(jax.make_jaxpr(step)(run, batch_shape(mesh, 64)))
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) > 8 and all(":bf16[" in line for line in products), products


def test_float32_means_float32_on_accelerators_too(tmp_path, monkeypatch):
    """TPUs and GPUs would multiply in fewer bits. A CPU does not: so look at what is asked for."""

    def look(*_):
        raise model.Refused(jax.config.jax_default_matmul_precision)

    monkeypatch.setattr(train, "open_log", lambda _: None)
    monkeypatch.setattr(train, "begin", look)
    with pytest.raises(model.Refused, match="^float32$"):
        train.train(train.parse(["--checkpoints", str(tmp_path / "run")]))


# ---- data --------------------------------------------------------------------------------------


@given(count=st.integers(1, 300), size=st.integers(1, 64), cut=st.integers(0, 30))
@settings(deadline=None)
def test_each_row_once_an_epoch_and_the_same_after_a_restart(count, size, cut):
    def some(stream, number):
        return [next(stream) for _ in range(number)]

    per_epoch = math.ceil(count / size)
    whole = some(train.shuffled(count, size, 7, train.Position()), per_epoch + cut + 1)
    first = np.concatenate([rows for rows, _ in whole[:per_epoch]])
    assert sorted(first) == list(range(count))
    position = whole[cut][1]
    assert 0 <= position.row < count and position.epoch == (cut + 1) // per_epoch
    rest = whole[cut + 1 :]
    again = some(train.shuffled(count, size, 7, position), len(rest))
    assert all(np.array_equal(a, b) and p == q for (a, p), (b, q) in zip(rest, again, strict=True))


def test_epochs_and_seeds_shuffle_differently():
    def order(seed, epoch):
        return tuple(next(train.shuffled(100, 100, seed, train.Position(epoch)))[0])

    assert len({order(seed, epoch) for seed in (0, 1, 2) for epoch in (0, 1, 2)}) == 9


def test_a_short_batch_is_filled_up_and_no_buffer_is_shared():
    mesh = model.make_mesh("fsdp-tensor", None, None)
    digits, _ = train.load_digits()
    digits = train.Digits(*(part.copy() for part in digits))
    rows = np.arange(100, 129)
    batch = train.on_devices(digits, rows, 64, mesh)
    before = digits.images_BI[rows].copy()
    digits.images_BI[:] = -1  # what a loader that uses its buffer again does
    assert [part.shape[0] for part in batch] == [64] * 3
    assert np.array_equal(batch.weights_B, [1] * 29 + [0] * 35)
    assert np.array_equal(np.asarray(batch.images_BI)[:29], before)
    assert batch.images_BI.sharding.shard_shape(batch.images_BI.shape) == (32, 64)


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
@pytest.mark.parametrize("data, split", [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_each_process_reads_what_its_devices_hold(data, split, processes):
    """Processes are made up here: runs of neighbouring devices, asked one by one."""
    mesh = model.make_mesh("fsdp-tensor", data, split)
    sharding = jax.NamedSharding(mesh, P("data"))
    held = sharding.devices_indices_map((16,))

    class Process:
        def __init__(self, devices):
            self.devices = devices

        def addressable_devices_indices_map(self, shape):
            return {device: held[device] for device in self.devices}

    read = []
    for devices in np.split(np.array(jax.devices()), processes):
        rows = model.rows_here(Process(devices), 16)
        assert set(rows) == {row for device in devices for row in np.arange(16)[held[device]]}
        assert list(rows) == sorted(set(rows))
        read.append(len(rows))
    copies = max(processes // data, 1)  # of a row, in as many processes
    assert sum(read) == 16 * copies


# ---- devices -----------------------------------------------------------------------------------


class Gpu:
    """What `make_mesh` asks of one of sixteen GPUs in two servers."""

    platform, device_kind = "gpu", "NVIDIA H100 80GB HBM3"

    def __init__(self, number):
        self.id, self.slice_index, self.process_index = number, number // 8, number // 8


def test_two_servers_share_the_data_axis_alone(monkeypatch):
    """`jax.make_mesh` refuses them."""
    gpus = [Gpu(number) for number in range(16)]
    monkeypatch.setattr(jax, "devices", lambda: gpus)
    monkeypatch.setattr(jax, "device_count", lambda: 16)
    with pytest.raises(ValueError, match="multi-slice"):
        jax.make_mesh((4, 4), ("data", "model"), devices=gpus)
    for name, data, split in [("fsdp-tensor", 2, 8), ("fsdp-tensor", 4, 4), ("fsdp", 16, 1)]:
        mesh = model.make_mesh(name, data, split)
        assert (mesh.axis_names, mesh.devices.shape) == (("data", "model"), (data, split))
        assert sorted(gpu.id for gpu in mesh.devices.flat) == list(range(16))
        for row in mesh.devices:
            assert len({gpu.slice_index for gpu in row}) == 1, "model crosses servers"
    with pytest.raises(model.Refused, match="--data 1 does not divide over 2 slices"):
        model.make_mesh("tensor", 1, 16)


@pytest.mark.parametrize("count, expected", [(1, (1, 1)), (2, (1, 2)), (4, (2, 2)), (6, (2, 3)),
    (8, (2, 4)), (16, (4, 4))])  # fmt: skip
def test_default_meshes(monkeypatch, count, expected):
    monkeypatch.setattr(jax, "devices", lambda: [Gpu(0)] * count)
    monkeypatch.setattr(jax, "device_count", lambda: count)
    monkeypatch.setattr(jax, "make_mesh", lambda sizes, *_, **__: sizes)
    assert model.make_mesh("fsdp-tensor", None, None) == expected
    assert model.make_mesh("tensor", None, None) == (1, count)
    for name in ("data-parallel", "zero1", "fsdp"):
        assert model.make_mesh(name, None, None) == (count, 1)
    if count % 2 == 0:
        assert model.make_mesh("tensor", 2, None) == model.make_mesh("tensor", None, count // 2)


# ---- what is written ---------------------------------------------------------------------------


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_metrics_lose_rows_that_are_taken_again_and_torn_ones(tmp_path):
    path = tmp_path / "metrics.csv"
    first = train.Metrics(path, 0)
    for step in range(1, 8):
        first.write({"step": step, "epoch": 0, "loss": 1 / step})
    with path.open("a") as file:
        file.write("3,0")  # killed while it wrote
    second = train.Metrics(path, 5)
    second.write({"step": 6, "epoch": 0, "loss": 0.5, "test_accuracy": 0.25})
    assert [row["step"] for row in rows_of(path)] == ["1", "2", "3", "4", "5", "6"]
    assert float(rows_of(path)[4]["loss"]) == 1 / 5, "digits are lost"
    assert rows_of(path)[-1]["test_accuracy"] == "0.25" and rows_of(path)[0]["test_loss"] == ""
    assert [child.name for child in tmp_path.iterdir()] == ["metrics.csv"]


def test_other_processes_write_no_metrics(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train.Metrics(None, 0).write({"step": 1})
    assert not list(tmp_path.iterdir())


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
