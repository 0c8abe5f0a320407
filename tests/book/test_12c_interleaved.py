"""The page "Interleaved pipelines"."""

import re
from unittest import mock

import jax
import numpy as np
import pytest

import meshscope as ms
from pages import check_exercise, compiled_for_cpu, exercises_of, run_again, source_of
from traced import equations

PAGE = "12c-interleaved"


def when(page, n, M, laps):
    """The tick of each (lap, device, microbatch), from what devices do when they are not idle."""
    with mock.patch.dict(page.work.__globals__, stages=n, M=M):
        return {
            (lap, s, m): t
            for s in range(n)
            for t in range(page.ticks_of(laps))
            for lap, m in [page.work(s, t, laps)]
            if 0 <= lap < laps and 0 <= m < M
        }


def permutes(page, laps):
    moved = ms.collectives(page.programs[laps], page.line)
    return [row for row in moved if row.kind == "collective-permute"]


def weights_of(page, laps):
    return {key: page.split_layers(w, laps) for key, w in page.params.items()}


def test_one_and_two_laps_have_the_loss_and_gradient_of_one_device(page):
    """Both pipelines equal one device, up to float32 rounding."""
    assert list(page.results) == [1, 2]
    for loss, gradient in page.results.values():
        np.testing.assert_allclose(loss, page.true_loss, rtol=1e-5)
        for key, true in page.true_gradient.items():
            found = gradient[key].reshape(true.shape)
            np.testing.assert_allclose(found, true, rtol=1e-4, atol=1e-5)
        assert page.equal(loss, gradient)


def test_three_updates_are_those_of_one_device(page):
    """Three steps of gradient descent with two laps give the weights of one device."""
    single, w = page.params, weights_of(page, 2)
    for _ in range(3):
        _, gradient = page.single(single, page.x_MBD, page.target_MBD)
        single = jax.tree.map(lambda w, g: w - 0.05 * g, single, gradient)
        _, gradient = page.programs[2](w, page.x_MBD, page.target_MBD)
        w = jax.tree.map(lambda w, g: w - 0.05 * g, w, gradient)
    for key, wanted in single.items():
        np.testing.assert_allclose(w[key].reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-5)


def test_the_bubble_is_what_the_formula_says(page):
    """Each device does its M microbatches in each lap, and is idle for n - 1 of vM + n - 1 ticks."""
    for n, M, laps in [(4, 8, 1), (4, 8, 2), (2, 6, 3), (3, 9, 2), (8, 16, 4)]:
        at = when(page, n, M, laps)
        assert len(at) == laps * n * M and max(at.values()) + 1 == laps * M + n - 1
        with mock.patch.dict(page.work.__globals__, stages=n, M=M):
            assert page.ticks_of(laps) == laps * M + n - 1
        for s in range(n):
            assert len({t for (_, device, _), t in at.items() if device == s}) == laps * M


def test_nothing_has_to_wait_in_a_buffer(page):
    """A microbatch is used on the tick after it was sent, also when it comes back to device 0."""
    for n, M, laps in [(4, 8, 2), (2, 6, 3), (3, 9, 2)]:
        at = when(page, n, M, laps)
        for (lap, s, m), t in at.items():
            if s:
                assert at[lap, s - 1, m] == t - 1
            elif lap:
                assert at[lap - 1, n - 1, m] == t - 1


def test_the_first_microbatch_reaches_the_last_device_after_three_layers(page):
    """With one lap, it passes six of the eight layers first."""
    for laps, layers in [(1, 6), (2, 3)]:
        at, chunk = when(page, 4, 8, laps), 8 // (4 * laps)
        assert at[0, 3, 0] * chunk == layers


def test_device_0_does_four_microbatches_in_each_lap_in_turn(page):
    """Microbatches 0 to 3 in lap 0, then in lap 1, then the next four; microbatch 0 is back on tick 4."""
    order = [page.work(0, t, laps=2) for t in range(16)]
    assert order == [
        (lap, m) for first in (0, 4) for lap in (0, 1) for m in range(first, first + 4)
    ]
    at = when(page, 4, 8, 2)
    assert at[0, 3, 0] == 3 and at[1, 0, 0] == 4


def loops_over_ticks(page):
    """The two scans over 19 ticks in the gradient: the forward pass and the backward pass."""
    mapped = jax.shard_map(
        page.pipeline_loss,
        mesh=page.line,
        in_specs=(page.P(None, "stage"), page.P(), page.P()),
        out_specs=page.P(),
    )
    jaxpr = jax.make_jaxpr(jax.grad(mapped))(weights_of(page, 2), page.x_MBD, page.target_MBD)
    return [eqn for eqn, _ in equations(jaxpr.jaxpr, "scan") if eqn.params["length"] == 19]


def test_autodiff_runs_the_same_ticks_backwards(page):
    """The loop over 19 ticks is transposed to one from the last tick to the first."""
    assert [loop.params["reverse"] for loop in loops_over_ticks(page)] == [False, True]


def test_checkpoint_stores_inputs_and_no_weights(page):
    """Without it, the weights of a chunk are stored for each of the 19 ticks."""

    def stored(page):
        return {v.aval.shape for v in loops_over_ticks(page)[0].outvars if v.aval.ndim > 1}

    assert stored(page) == {(8, 32), (19, 8, 32)}  # the carry, and outputs or inputs
    with mock.patch.object(jax, "checkpoint", lambda function: function):
        assert {(19, 1, 32, 64), (19, 1, 64, 32)} <= stored(page)


def test_on_idle_ticks_m_is_not_a_microbatch(page):
    """It is negative or at least M; m % M is one of them, so the index is in range."""
    for laps in (1, 2):
        busy = {(s, t) for (_, s, _), t in when(page, 4, 8, laps).items()}
        for s in range(4):
            for t in set(range(page.ticks_of(laps))) - {t for d, t in busy if d == s}:
                assert not 0 <= page.work(s, t, laps)[1] < 8


def test_each_device_holds_two_layers_that_are_four_apart(page):
    """Device s has the layers s and s + 4."""
    layers = page.split_layers(np.arange(8), laps=2)
    assert [layers[:, s].ravel().tolist() for s in range(4)] == [[s, s + 4] for s in range(4)]


@compiled_for_cpu
def test_each_tick_runs_a_permute_forwards_and_one_backwards(page):
    """22 sends of 1,024 bytes with one lap and 38 with two."""
    for laps, sends in [(1, 22), (2, 38)]:
        rows = permutes(page, laps)
        assert sum(row.executions for row in rows) == sends
        assert all(row.wire_bytes == 4 * 8 * 32 and row.axes == ("stage",) for row in rows)


def test_a_device_in_the_middle_needs_twice_as_many_sends(page):
    """One output and one gradient for each microbatch and lap: 16 with one lap, 32 with two."""
    for laps, sends in [(1, 16), (2, 32)]:
        at = when(page, 4, 8, laps)
        assert 2 * sum(s == 1 for _, s, _ in at) == sends


def test_the_page_prints_the_bubble_and_the_bytes(page, capsys):
    """What the two cells print is what the formulas say, and so is the bubble for M = 16."""
    run_again(page, PAGE, "bubble")
    said = re.findall(r"(\d+) ticks, idle ([\d.]+)%", capsys.readouterr().out)
    assert said == [("11", "27.3"), ("19", "15.8")]
    at = when(page, 4, 16, 1)
    idle = 1 - 16 / (max(at.values()) + 1)
    assert f"with M = 16, it is {idle:.1%} with one lap" in source_of(PAGE).read_text("utf-8")
    if jax.default_backend() == "cpu":
        run_again(page, PAGE, "bytes")
        said = re.findall(r"(\d+) sends, ([\d,]+) bytes", capsys.readouterr().out)
        assert said == [("22", "22,528"), ("38", "38,912")]


def test_layers_on_the_wrong_devices_are_another_model(page):
    """No error, but the loss is that of the layers in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    order = page.split_in_a_row(np.arange(8)).ravel()
    assert order.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    permuted = {key: w[order] for key, w in page.params.items()}
    loss, _ = page.single(permuted, page.x_MBD, page.target_MBD)
    np.testing.assert_allclose(page.wrong_loss, loss, rtol=1e-5)
    assert abs(page.wrong_loss - page.true_loss) > 0.1


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
