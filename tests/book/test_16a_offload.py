"""The page "Make it fit": remat and host offload of chapter 16's step."""

import jax
import numpy as np
import pytest

from many_devices import compiled as tools
from many_devices.compiled import stored, stored_memory, stored_program
from stored_steps import GB, GIB, in_message, needs

PAGE = "16a-offload"


# Before compiling


def test_the_inputs_of_the_layers_take_1_07_gb_for_each_sequence(page):
    """2 bytes for each feature of each token in each layer."""
    assert f"{2 * page.llama_8b.L * 4096 * page.llama_8b.D / GB:.2f}" == "1.07"


def test_remat_has_more_matmuls_and_offload_moves_to_the_host(page):
    """Matmuls in the lowered text grow with remat; only the right name moves anything."""
    kept, _ = page.count_matmuls_and_moves(page.policies.everything_saveable)
    remat, moves = page.count_matmuls_and_moves(None)
    assert remat - kept == 8 and moves == 0
    assert page.count_matmuls_and_moves(page.offload("layer_input")) == (remat, 1)


def test_a_wrong_name_offloads_nothing_and_says_nothing(page, recwarn):
    """A policy accepts any name: the program is that of plain remat."""
    assert page.count_matmuls_and_moves(
        page.offload("layer_inputs")
    ) == page.count_matmuls_and_moves(None)
    assert not [one for one in recwarn if "offload" in str(one.message)]


def test_on_simulated_devices_an_offloading_step_has_the_same_loss(page):
    """Offload changes where layer inputs are kept, and no result."""
    axes, auto = ("replica", "data", "model"), (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh((1, 2, 1), axes, axis_types=auto, devices=jax.devices()[:2])
    tiny = page.Config(L=2, D=32, F=64, H=4, K=2, C=8, V=96, dtype="float32")
    losses = []
    for policy in (None, page.offload("layer_input")):
        step, *shapes = page.step_on(mesh, tiny, B=2, S=8, policy=policy)

        def put(like):
            return jax.device_put(np.full(like.shape, 0.1, like.dtype), like.sharding)

        losses.append(float(step(*jax.tree.map(put, shapes))[2]))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


# What the compiler makes of it


@pytest.mark.skipif(jax.__version__ != stored()["about"]["jax"], reason="of other releases")
@pytest.mark.parametrize("name, B", [("kept", 16), ("offload", 16), ("two-offload", 32)])
def test_the_stored_programs_are_the_step_with_these_policies(page, name, B):
    """Lowered for TPU, each has the hash that was stored."""
    policy = page.policies.everything_saveable if name == "kept" else page.offload("layer_input")
    program = page.step_on(page.sixteen, page.llama_8b, B=B, policy=policy)
    found = tools.digest(tools.lowered_for("tpu", *program))
    assert found == stored_program(f"ahead-v5e-16-{name}")["hash"]


def test_without_remat_it_needs_172_gb(page):
    """Everything kept, of one sequence; with remat, two sequences need 2.8 GB too much."""
    counts = [page.counted_gb(f"ahead-v5e-16-{name}") for name in ("kept", "two")]
    assert in_message("ahead-v5e-16-kept") == 159.99 and f"{counts[0]:.0f}" == "172"
    assert counts[1] == pytest.approx(in_message("ahead-v5e-16-two") * GIB / GB)
    assert f"{counts[1] - page.V5E / GB:.1f}" == "2.8"


def test_offload_makes_two_sequences_fit_with_their_inputs_on_the_host(page):
    """2,147,483,648 bytes are predicted and on the host; 16.5 GB on the chip, 0.4 to spare."""
    memory = stored_memory("ahead-v5e-16-two-offload", "tpu")
    assert memory.host_bytes_per_device == page.inputs == 2_147_483_648
    assert page.memory == memory
    peak = memory.peak
    assert peak == needs("ahead-v5e-16-two-offload") <= page.V5E
    assert f"{peak / GB:.1f} {(page.V5E - peak) / GB:.1f}" == "16.5 0.4"
    assert in_message("ahead-v5e-16-two") * GIB > page.V5E
