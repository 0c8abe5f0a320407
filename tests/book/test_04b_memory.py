"""The page "Does it fit?": what fills memory in training, and how to measure it."""

import os
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jaxlib import xla_client

import meshscope as ms
from many_devices.compiled import stored_memory, stored_program
from many_devices.stacked import Model, large
from many_devices.training import adamw, step_program
from pages import check_exercise, compiled_for_cpu, exercises_of, source_of

PAGE = "04b-memory"
TEXT = source_of(PAGE).read_text("utf-8")
H100_BYTES = 81_559 * 2**20  # what nvidia-smi says
V5E_BYTES = 15.75 * 2**30  # "available HBM" in the messages of its compiler


def gb(tree_or_program):
    return ms.memory(tree_or_program).bytes_per_device / 1e9


def test_a_weight_costs_16_bytes(page):
    """Weight, gradient and two moments in float32: 68.7 GB of data parallelism, 8.6 of FSDP."""
    D, F, L = large.D, large.F, large.L
    numbers = 2 * L * D * F + (64 + 16) * D + L * F + 2 * L * D
    assert round(numbers / 1e9, 1) == 4.3
    held = page.state(page.data_parallel)
    assert held["weights"] == held["gradients"] == 4 * numbers
    assert held["moments"] == 8 * numbers + 8  # and two counters
    assert f"{held['weights'] / 1e9:.1f} {sum(held.values()) / 1e9:.1f}" == "17.2 68.7"
    of_fsdp = sum(page.state(page.fsdp).values()) / 1e9
    assert f"{of_fsdp:.1f}" == "8.6"
    assert round(of_fsdp + page.kept_gb(page.fsdp)) == 52
    assert round(sum(held.values()) / 1e9 + page.kept_gb(page.data_parallel)) == 112


def test_gradients_are_counted_as_sharded_as_the_moments(page):
    """With moments in eighths and whole weights, `state` counts gradients in eighths, as ZeRO-1 needs."""

    def made(config, strategy):
        model = Model(config, strategy, nnx.Rngs(0))
        for _, weight in nnx.to_flat_state(nnx.state(model)):
            if weight.size >= 4096:
                whole = [None] * (weight.ndim - 1)
                weight.set_metadata(optimizer_sharding=(*whole, "data"))
        return model, nnx.Optimizer(model, adamw, wrt=nnx.Param)

    held = page.state(page.data_parallel, make=made)
    assert held["weights"] == page.state(page.data_parallel)["weights"]
    assert 0.12 < held["gradients"] / held["weights"] < 0.13


def test_a_layer_keeps_as_much_as_20_arrays_of_width_d(page):
    """Four arrays of width D and four of F = 4 D: 20 times 67 MB in 32 layers, 43 GB."""
    assert (page.of_D, page.of_F) == (4, 4) and set(page.widths) == {1, large.D, large.F}
    assert large.F == 4 * large.D and page.ROWS == 8 * 4096
    assert round(4096 * 4096 * 4 / 1e6) == 67
    assert round(20 * 4096 * 4096 * 4 / 1e9, 2) == 1.34
    by_hand = 20 * 4096 * 4096 * 4 * 32 / 1e9
    assert abs(page.kept_gb(page.fsdp) - by_hand) < 0.01 and round(by_hand) == 43
    assert 4.9 < page.kept_gb(page.fsdp) / (sum(page.state(page.fsdp).values()) / 1e9) < 5.1


def test_the_bars_are_what_was_counted(page):
    """112 GB of data parallelism and 52 of FSDP, of which activations are 43 in both."""
    totals = {name: round(sum(row.values()) / 1e9) for name, row in page.memory.items()}
    assert totals == {"data parallel": 112, "FSDP": 52}
    assert all(f"{row['activations'] / 1e9:.1f}" == "43.0" for row in page.memory.values())


def test_fsdp_fits_on_an_h100_and_data_parallelism_on_neither():
    """By the bars and by the compiler for H100, with what a program can use by default; a v5e has less."""
    compiled = stored_memory("train-large-fsdp", "gpu").bytes_per_device
    assert 52e9 < compiled < 0.75 * H100_BYTES < 112e9 and V5E_BYTES < 52e9


@compiled_for_cpu
@pytest.mark.parametrize("name, whole", [("data parallel", 113), ("FSDP", 53)])
def test_a_program_that_keeps_everything_asks_for_little_more_than_counted(page, name, whole):
    """Compiled for CPU, scratch is 1.3 to 1.5 GB: a step asks for hardly more than we count."""
    strategy = page.strategies[name]
    counted = sum(page.state(strategy).values()) / 1e9 + page.kept_gb(strategy)
    if name == "data parallel":
        assert f"{counted:.1f}" == "111.7"
    asked = gb(step_program(large, strategy, page.ROWS))
    assert 1.3 < asked - counted < 1.5 and round(asked) == whole


@compiled_for_cpu
def test_arguments_are_weights_and_moments_outputs_alias_and_the_rest_is_temporary(page):
    """Arguments 6.5 GB, outputs all but 196 bytes aliased; temporaries: 2.2 GB of gradients, 43.0 of
    activations, 1.4 of scratch."""
    memory = ms.memory(step_program(large, page.fsdp, page.ROWS))
    held = page.state(page.fsdp)
    batch = page.ROWS // 8 * (64 + 1 + 1) * 4
    assert memory.arguments == held["weights"] + held["moments"] + batch
    assert f"{memory.arguments / 1e9:.1f}" == "6.5"
    assert 0 <= memory.outputs - memory.aliased < 1000
    gradients, activations = held["gradients"] / 1e9, page.kept_gb(page.fsdp)
    assert f"{gradients:.1f} {activations:.1f}" == "2.2 43.0"
    assert f"{memory.temporaries / 1e9 - gradients - activations:.1f}" in ("1.3", "1.4", "1.5")


def test_the_compilers_for_h100_and_tpu_plan_53_9_gb_and_raise_an_error():
    """For H100 the step is planned with 53.9 GB, more than it has is no error; for TPU v5e 48.1 GB
    are too many."""
    assert f"{stored_memory('train-large-fsdp', 'gpu').bytes_per_device / 1e9:.1f}" == "53.9"
    message = stored_program("train-large-fsdp")["tpu"]["refused"]
    assert message.startswith("RESOURCE_EXHAUSTED") and "(44.80G) exceeds" in message
    assert f"{44.80 * 2**30 / 1e9:.1f}" == "48.1" and 44.80 * 2**30 > V5E_BYTES
    assert "plans 53.9 GB" in TEXT and "would need 48.1 GB" in TEXT


def test_what_a_program_can_use_of_two_devices():
    """15.75 of 16 GiB of a TPU v5e are 16.9 GB; 75 % of the 85.5 GB of an H100 are 64."""
    assert "available HBM (15.75G)" in stored_program("train-large-fsdp")["tpu"]["refused"]
    assert f"{16 * 2**30 / 1e9:.1f} {V5E_BYTES / 1e9:.1f}" == "17.2 16.9"
    assert f"{H100_BYTES / 2**30:.1f} {H100_BYTES / 1e9:.1f}" == "79.6 85.5"
    assert round(0.75 * H100_BYTES / 1e9) == 64
    assert "| H100 | 79.6 GiB, or 85.5 GB | 75% by default, or 64 GB |" in TEXT
    assert "| TPU v5e | 16 GiB, or 17.2 GB | 15.75 GiB, or 16.9 GB |" in TEXT


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_both_names_of_the_variable_set_the_fraction(name):
    """XLA_CLIENT_MEM_FRACTION sets the fraction of memory, and so does its older name."""
    options = xla_client.generate_pjrt_gpu_plugin_options
    with mock.patch.dict(os.environ):
        for variable in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
            os.environ.pop(variable, None)
        assert "memory_fraction" not in options()  # XLA's own default then
        os.environ[name] = "0.95"
        assert options()["memory_fraction"] == 0.95


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices count their memory")
def test_a_cpu_has_no_memory_stats():
    """For a CPU, `memory_stats()` is None."""
    assert jax.local_devices()[0].memory_stats() is None


def test_activations_grow_with_the_batch_and_the_layers(page):
    """What is kept has a dimension for the layers and one for the rows."""
    assert {array.shape[:2] for array in page.kept(page.fsdp)} == {(large.L, page.ROWS)}


def test_too_large_an_array_raises_resource_exhausted():
    """The message of too little memory begins with RESOURCE_EXHAUSTED."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        jnp.zeros(10**15).block_until_ready()


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    """Its check says "not yet" to the stub and a wrong answer, and "correct" to the solution."""
    check_exercise(page, PAGE, exercise)


def test_the_solution_raises_if_the_activations_alone_do_not_fit(page):
    """The solution raises an error where no number of devices is enough."""
    with pytest.raises(ValueError, match="activations alone"):
        page.answer_devices(1e9, 64e9, 64e9)
