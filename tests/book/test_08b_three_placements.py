"""The page "One MLP in three placements"."""

import itertools
from collections import Counter

import jax
import numpy as np
import pytest

import meshscope as ms
from many_devices.compiled import stored_program
from many_devices.helpers import put
from pages import check_exercise, compiled_for_cpu, exercises_of

PAGE = "08b-three-placements"
P = jax.P


# Specs


def test_four_kinds_of_specs_shard_a_matrix_over_two_axes(page):
    """Each puts other pieces on the devices, and each of the ten specs that shard is like one of them."""

    def kind(spec):
        """The names of axes in each dimension; of one dimension alone, only their number."""
        named = [tuple(jax.tree.leaves(entry)) for entry in spec]
        return tuple(named) if all(named) else len(named[0] + named[1])

    entries = [None, "data", "model", ("data", "model"), ("model", "data")]
    every = [
        P(rows, columns)
        for rows, columns in itertools.product(entries, entries)
        if len(used := jax.tree.leaves([rows, columns])) == len(set(used)) > 0
    ]
    assert len(every) == 10
    assert {kind(spec) for spec in every} == {kind(spec) for spec in page.specs}
    found = set()
    for spec in page.specs:
        placed = put(page.x_host, page.mesh, *spec)
        found.add(str(placed.sharding.devices_indices_map(placed.shape)))
    assert len(found) == len(page.specs) == 4


def test_an_axis_that_a_spec_leaves_out_means_copies(page):
    """Every spec: the size of a piece, and how many devices hold each."""

    def parts(entry):
        return int(np.prod([page.mesh.shape[axis] for axis in jax.tree.leaves(entry)]))

    for spec in page.specs:
        shards = put(page.x_host, page.mesh, *spec).addressable_shards
        rows, columns = parts(spec[0]), parts(spec[1])
        assert {shard.data.shape for shard in shards} == {(64 // rows, 64 // columns)}
        holders = Counter(str(shard.index) for shard in shards)
        assert set(holders.values()) == {page.mesh.size // (rows * columns)}


# The step and its placements


def compiled_steps(page):
    """Inputs, mesh, axes of the rows, and what is summed over model besides, for each placement."""
    return [
        (page.in_eight, page.mesh, ("data", "model"), 8, {}),
        (page.in_four_by_two, page.tall_mesh, ("data",), 4, {("model",): 4 * 64 * 64 // 4}),
    ]


def test_the_loss_and_its_gradients_are_those_of_one_device(page):
    """In both placements."""
    loss_alone, gradients_alone = page.one_device
    for inputs, *_ in compiled_steps(page):
        loss, gradients = page.step(*inputs)
        np.testing.assert_allclose(loss, loss_alone, rtol=1e-5)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(gradient, gradients_alone[name], rtol=1e-4, atol=1e-6)
    alone = page.step(page.params, page.x_host, page.target)[0]
    assert alone == loss_alone and len(loss_alone.devices()) == 1


def test_a_device_has_its_rows_of_the_batch_and_its_share_of_the_weights(page):
    """An eighth of the rows and all weights, or a quarter of the rows and half of the weights."""
    assert sum(w.nbytes for w in page.params.values()) == 66_048
    for inputs, _, _, rows, over_model in compiled_steps(page):
        for array in inputs[1:]:
            assert array.addressable_shards[0].data.shape == (64 // rows, 64)
        share = 2 if over_model else 1
        assert ms.memory(inputs[0]).bytes_per_device == 66_048 // share


@compiled_for_cpu
def test_a_step_sums_66052_bytes_or_37124(page):
    """Compiled for CPU: the gradients and the loss; on 4 x 2 the result of the second matmul too."""
    for inputs, mesh, row_axes, _, over_model in compiled_steps(page):
        moved = ms.collectives(page.step.lower(*inputs).compile(), mesh)
        expected = {row_axes: ms.memory(inputs[0]).bytes_per_device + 4, **over_model}
        assert sum(expected.values()) == (37_124 if over_model else 66_052)
        found = {axes: total.payload_bytes for axes, total in moved.by("axes").items()}
        assert found == expected and moved.kinds == {"all-reduce"}


@pytest.mark.parametrize("compiler", ["gpu", "tpu", "cpu"])
def test_the_compilers_for_h100_and_tpu_sum_the_same(compiler):
    """The stored programs sum 66,052 and 37,124 bytes with each compiler."""
    for name, size in [("eight", 66_052), ("four-by-two", 37_124)]:
        moves = stored_program(f"arrays-{name}")[compiler]["moves"]
        assert {move["kind"] for move in moves} == {"all-reduce"}
        assert sum(move["payload"] for move in moves) == size


@compiled_for_cpu
def test_a_device_does_an_eighth_of_the_work(page):
    """Compiled for CPU, in both placements; little is computed twice."""
    alone = page.step.lower(page.params, page.x_host, page.target).compile()
    for inputs, *_ in compiled_steps(page):
        flops = page.step.lower(*inputs).compile().cost_analysis()["flops"]
        assert 1 < 8 * flops / alone.cost_analysis()["flops"] < 1.05


def test_the_page_reports_what_a_step_sums(page, capsys):
    """`report` prints the loss of one device, and the summed bytes, of each placement."""
    for inputs, size in [(page.in_eight, "66,052"), (page.in_four_by_two, "37,124")]:
        page.report("placed", inputs)
        told = capsys.readouterr().out
        assert told == f"placed: loss {page.one_device[0]:.6f}, {size} bytes are summed\n"


@compiled_for_cpu
def test_gradients_on_four_by_two_are_half_as_large(page):
    """A device has half of every gradient, and 16 rows of 64 numbers of the second product."""
    for inputs, size in [(page.in_eight, 66_048), (page.in_four_by_two, 33_024)]:
        assert ms.memory(page.step(*inputs)[1]).bytes_per_device == size
    moved = ms.collectives(page.step.lower(*page.in_four_by_two).compile(), page.tall_mesh)
    assert moved.by("axes").bytes(("model",)) == 16 * 64 * 4 == 4096


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
