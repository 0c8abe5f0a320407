"""The page "Gradient accumulation": the same gradients in microbatches, and what they send."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

import meshscope as ms
from compared import apart, host
from many_devices.compiled import stored_memory, stored_program
from many_devices.memory import ROWS, kept_gb, state
from many_devices.stacked import large, strategies, tiny
from many_devices.training import batch_of, place, sent_mb, shuffled, step_program
from pages import compiled_for_cpu

PAGE = "04e-accumulation"
NEW = jax.__version_info__ >= (0, 12)  # of scratch memory, what the test says is this release's
P = jax.P
FSDP = strategies["FSDP"]
MIXED = replace(
    FSDP,
    use=lambda part: jax.tree.map(lambda weight: weight.astype("bfloat16"), part),
    remat=jax.checkpoint,
)


def test_in_four_parts_a_padded_batch_gives_the_same_loss_and_gradients(page):
    """29 real rows in parts of 8, 7, 7 and 7: the loss agrees to 1e-6, moments to 1e-5."""
    _, in_sums, parts_loss = page.in_four(*place(page.data_parallel), page.last)
    _, at_once, once_loss = page.at_once(*place(page.data_parallel), page.last)
    assert np.isclose(parts_loss, once_loss, rtol=1e-6) and in_sums.step[...] == 1
    assert apart(host(in_sums.opt_state[0].mu), host(at_once.opt_state[0].mu)) < 1e-5
    real_rows = np.asarray(page.deal(page.last[2], 4)).sum(axis=1)
    assert real_rows.tolist() == [8, 7, 7, 7]  # so a mean of means would be wrong


def test_the_last_batch_has_29_real_rows(page):
    """29 real rows and 35 of padding."""
    assert len(shuffled(0)[-1]) == 29 and page.last[2].sum() == 29 and len(page.last[2]) == 29 + 35


def blocks(array, parts):
    return array.reshape(parts, -1, *array.shape[1:])


@compiled_for_cpu
def test_rows_dealt_to_parts_stay_on_their_devices(page):
    """Dealt like cards no row moves; cut into blocks, rows do."""
    mesh, messages = page.data_parallel.mesh(), {}
    by_rows = jax.NamedSharding(mesh, P(None, "data"))
    x_BI = batch_of(np.arange(64), mesh)[0]
    for way in (page.deal, blocks):
        jitted = jax.jit(partial(way, parts=4), out_shardings=by_rows)
        messages[way] = len(ms.collectives(jitted.lower(x_BI).compile()))
        assert jitted(x_BI).sharding.shard_shape((4, 16, 64)) == (4, 2, 64)
    assert messages[page.deal] == 0 < messages[blocks]
    assert np.array_equal(page.deal(np.arange(64), 4)[1], np.arange(1, 64, 4))


@compiled_for_cpu
@pytest.mark.parametrize("parts, stay", [(4, True), (8, True), (16, False)])
def test_no_row_moves_if_the_parts_divide_the_rows_of_a_device(page, parts, stay):
    """Of 64 rows a device has 8: of 4 or 8 parts it has rows of each, of 16 parts only of 8."""
    part_of_row = np.empty(64, int)
    for part, rows in enumerate(page.deal(np.arange(64), parts)):
        part_of_row[rows] = part
    assert all((len(set(own)) == parts) is stay for own in part_of_row.reshape(8, 8))
    step = partial(page.accumulated_step, parts=parts)
    moved = ms.collectives(step_program(tiny, page.data_parallel, 64, step=step), page.mesh)
    assert (moved.kinds == {"all-reduce"}) is stay


@compiled_for_cpu
def test_in_four_parts_a_step_needs_a_third_of_the_temporaries(page):
    """A quarter of the activations, and a second set of gradients; for H100 at once 47.4 GB."""
    at_once, in_four = (
        ms.memory(program).temporaries / 1e9 for program in (page.large_at_once, page.large_in_four)
    )
    assert 0.3 < in_four / at_once < 0.4
    activations, gradients = kept_gb(FSDP), state(FSDP)["gradients"] / 1e9
    assert abs(at_once - in_four - (3 / 4 * activations - gradients)) < 1
    for_h100 = stored_memory("train-large-fsdp", "gpu").temporaries / 1e9
    assert f"{for_h100:.1f}" == "47.4" and abs(for_h100 - at_once) < 1


@compiled_for_cpu
def test_if_activations_are_small_accumulation_saves_nothing_and_can_cost_memory(page):
    """The tiny model's 64 rows; the large model in bfloat16 with remat: eight parts need 1 GB more."""
    assert ms.memory(page.in_four).temporaries > ms.memory(page.at_once).temporaries
    in_eight = partial(page.accumulated_step, parts=8)
    at_once, in_parts = (
        ms.memory(step_program(large, MIXED, ROWS, **how)).bytes_per_device / 1e9
        for how in ({}, {"step": in_eight})
    )
    if NEW:  # JAX 0.10's compiler needs more scratch for either
        assert 0.9 < in_parts - at_once < 1.2


@compiled_for_cpu
def test_each_part_sends_what_a_step_sends(page):
    """Data parallelism in four parts: 8.54 MB in place of 2.134; FSDP in eight, nearly eight times."""
    assert f"{sent_mb(page.at_once):.3f} {sent_mb(page.in_four):.2f}" == "2.134 8.54"
    assert abs(sent_mb(page.in_four) / sent_mb(page.at_once) - 4) < 1e-3
    at_once = sent_mb(step_program(tiny, FSDP, 64))
    in_eight = partial(page.accumulated_step, parts=8)
    in_parts = sent_mb(step_program(tiny, FSDP, 64, step=in_eight))
    assert 7.9 < in_parts / at_once < 8


@pytest.mark.parametrize("compiler", ["tpu", "gpu"])
def test_for_h100_and_tpu_four_parts_send_3_9_times_as_much(compiler):
    """The compilers for H100 and TPU v5e send 3.9 times as much in four parts as at once."""
    sent = {
        name: sum(move["wire"] for move in stored_program(name)[compiler]["moves"])
        for name in ("train-parts-4", "train-dp")
    }
    assert f"{sent['train-parts-4'] / sent['train-dp']:.1f}" == "3.9"
