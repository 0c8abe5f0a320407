"""The page "Restart with more or fewer processes"."""

import os
import signal
import time

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from many_devices.data import images_BI, labels_B, train
from many_devices.processes import data_mesh, rows_here, run, say
from pages import check_exercise, exercises_of

PAGE = "11b-process-restarts"
EVERY_ROW_ONCE = dict.fromkeys(range(100), 1)


def steps_of(life):
    """The lines in which it said a loss."""
    return [line for line in life.log if line.startswith("step")]


def saved(page, name, step):
    """All weights and momentum of a checkpoint, and its notes."""
    with ocp.training.Checkpointer(page.disk / name) as saver:
        like = page.start(saver, data_mesh())[0]
        state = saver.load(step, abstract_state=like)
        notes = saver.metadata(step).custom_metadata
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state)]), notes


# The position


def test_an_epoch_reads_each_row_once_and_the_next_in_another_order(page):
    """`shuffle` draws the order from the seed, and `repeat` draws a new one for each epoch."""
    hundred = page.order_of(100, 16)
    epochs = [np.concatenate([hundred[7 * epoch + n] for n in range(7)]) for epoch in range(2)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert not np.array_equal(*epochs)


def test_the_last_batch_of_an_epoch_has_four_rows(page):
    """100 rows make six batches of 16, and four rows remain."""
    hundred = page.order_of(100, 16)
    assert [len(hundred[n]) for n in range(7)] == [16] * 6 + [4]


def test_the_position_is_the_number_of_the_next_batch(page):
    """After three batches it is 3."""
    assert page.position == {"next_index": 3}


def test_the_position_continues_to_count_in_the_next_epoch(page):
    """An epoch has seven batches; after eight the position is 8."""
    iterator = page.iterate(page.order_of(100, 16))
    for _ in range(8):
        next(iterator)
    assert iterator.get_state() == {"next_index": 8}


def test_an_iterator_set_to_a_position_continues_with_the_same_rows(page):
    """The fourth batch is the same after a restart, and so is the position after it."""
    assert page.resumed.tolist() == page.fourth.tolist()
    assert page.fourth.tolist() != page.order_of(100, 16)[0].tolist()
    assert page.after_a_restart.get_state() == page.iterator.get_state() == {"next_index": 4}


@pytest.mark.parametrize("changed", ["rows", "seed"])
def test_the_position_does_not_describe_the_order(page, changed):
    """With other rows or another seed, the same position is followed by other rows."""
    import grain

    rows, seed = (50, 0) if changed == "rows" else (100, 1)
    other = grain.MapDataset.range(rows).seed(seed).shuffle().batch(16).repeat()
    iterator = page.iterate(other)
    iterator.set_state(page.position)
    assert next(iterator).tolist() != page.fourth.tolist()


# Two ways to share


def test_a_part_for_each_loses_rows_and_reads_as_many_twice(page):
    """28 rows are never read and 28 twice, and nothing raises."""
    times = page.times_read(page.from_own_part)
    assert times.count(0) == times.count(2) == 28
    assert times.count(1) == 96 - 2 * 28


def test_it_loses_a_quarter_of_the_rows_on_average(page):
    """A row is missed both times with a chance of one half times one half: 24 of 96."""
    import grain

    missed = []
    for seed in range(8):
        seen = set()
        for processes, part_of in [(2, slice(3)), (4, slice(3, 6))]:
            for process in range(processes):
                part = slice(process * 96 // processes, (process + 1) * 96 // processes)
                mine = grain.MapDataset.range(96)[part].seed(seed).shuffle()
                mine = mine.batch(16 // processes)
                batches = [mine[number] for number in range(6)][part_of]
                seen |= set(np.concatenate(batches).tolist())
        missed.append(96 - len(seen))
    assert 22 < np.mean(missed) < 26


def test_one_order_loses_no_row_and_reads_none_twice(page):
    """Three batches by two processes and three by four are the epoch."""
    assert set(page.times_read(page.from_one_order)) == {1}


def test_the_position_means_the_same_to_1_2_4_and_8_processes(page):
    """The shares of all processes together are the batches of the order, in order."""
    batches = [page.order_of(96, 16)[number] for number in range(6)]
    for processes in (1, 2, 4, 8):
        shares = [np.stack(page.from_one_order(each, processes)) for each in range(processes)]
        assert np.array_equal(np.concatenate(shares, axis=1), batches)


# The short batch


def test_a_short_batch_is_padded_with_rows_of_weight_0(page):
    """The first four rows are those that were asked for; the other twelve have weight 0."""
    images, labels, weights = page.short_batch
    np.testing.assert_array_equal(images[:4], images_BI[train][page.last_rows])
    np.testing.assert_array_equal(labels[:4], labels_B[train][page.last_rows])
    assert images.shape == (16, 64) and weights.tolist() == [1] * 4 + [0] * 12


def test_the_padding_does_not_count(page):
    """The loss of the padded batch is that of its four rows, computed without sharding."""
    mesh = data_mesh()
    loss = page.compiled_step(mesh)(*page.new_state(mesh), page.short_batch)[2]
    weights, _ = page.new_state(mesh)
    logits = jax.nn.silu(images_BI[train][page.last_rows] @ weights["w_IF"]) @ weights["w_FV"]
    log_p = jax.nn.log_softmax(logits)[np.arange(4), labels_B[train][page.last_rows]]
    np.testing.assert_allclose(loss, -log_p.mean(), rtol=1e-5)


def read_short(folder):
    """The weights of four rows, as each process holds them."""
    last_rows = np.array([96, 1, 45, 7])
    _, _, weights_B = batch_on(data_mesh(), folder, last_rows, 16)  # noqa: F821  (the page's)
    mine = np.concatenate([shard.data for shard in weights_B.addressable_shards])
    say("weights of my rows:", *mine.astype(int))


def test_process_1_reads_nothing_and_takes_part_with_rows_of_weight_0(page):
    """Process 0 reads the four rows and pads them to eight; process 1 has eight of padding."""
    uses, given = (data_mesh, rows_here, page.batch_on), {"folder": str(page.disk)}
    lives = run(read_short, 2, 4, uses=uses, given=given)
    assert [life.log[1:-1] for life in lives] == [
        ["reads 96 1 45 7", "weights of my rows: 1 1 1 1 0 0 0 0"],
        ["reads", "weights of my rows: 0 0 0 0 0 0 0 0"],
    ]


# Killed, and restarted


def test_process_1_was_killed_and_jax_aborted_the_other(page):
    """Both took five steps, and the exit codes are those of an abort and of SIGKILL."""
    assert [life.code for life in page.killed] == [-signal.SIGABRT, -signal.SIGKILL]
    assert all(len(steps_of(life)) == 5 for life in page.killed)


def test_nothing_newer_than_step_3_is_on_disk_after_the_kill(page):
    """So steps 4 and 5 have to be taken again."""
    assert page.steps_on_disk("killed") == [3]


def test_a_checkpoint_has_the_position_beside_the_weights(page):
    """Orbax saves the notes: after three steps the position is 3, after nine 9."""
    assert saved(page, "killed", 3)[1] == {"position": {"next_index": 3}}
    assert saved(page, "warned", 9)[1] == {"position": {"next_index": 9}}


def test_each_process_writes_its_own_pieces(page):
    """All of them write into one checkpoint."""
    for name, count in [("as many", 2), ("more", 4), ("fewer", 1)]:
        written = {path.name for path in (page.disk / name / "9").glob("**/*.process_*")}
        assert written == {f"ocdbt.process_{number}" for number in range(count)}


def test_the_processes_of_a_job_have_the_same_losses(page):
    """Each restart takes steps 4 to 9, and all of its processes say the same."""
    assert [len(lives) for lives in page.restarts.values()] == [2, 4, 1]
    for lives in page.restarts.values():
        for life in lives:
            assert life.code == 0 and steps_of(life) == steps_of(lives[0])
            assert [line.split(":")[0] for line in steps_of(life)] == [
                f"step {n}" for n in range(4, 10)
            ]


def test_restarts_have_the_losses_of_a_job_that_was_never_killed(page):
    """With as many, more and fewer processes, steps 4 to 9 are those of the job never killed."""
    never_killed = page.losses_of(page.warned[0])[3:9]
    assert float(never_killed[-1]) < float(never_killed[0])
    for lives in page.restarts.values():
        losses = [float(loss) for loss in page.losses_of(lives[0])]
        np.testing.assert_allclose(losses, np.array(never_killed, float), rtol=1e-4)


def test_restarts_end_with_the_weights_of_a_job_that_was_never_killed(page):
    """Weights and momentum of step 9 are the same, to rounding."""
    never_killed, _ = saved(page, "warned", 9)
    assert never_killed.size == 2 * (64 * 256 + 256 * 16) and np.ptp(never_killed) > 0.1
    for name in page.restarts:
        ended_with, _ = saved(page, name, 9)
        np.testing.assert_allclose(ended_with, never_killed, rtol=1e-4, atol=1e-6)


def test_with_as_many_processes_the_last_bits_are_the_same(page):
    """Weights and momentum of step 9 are equal in every bit."""
    assert np.array_equal(saved(page, "as many", 9)[0], saved(page, "warned", 9)[0])


def test_on_four_devices_in_place_of_eight_they_differ_by_rounding(page):
    """Sums are added in another order, so not every bit is the same."""
    assert not np.array_equal(saved(page, "fewer", 9)[0], saved(page, "warned", 9)[0])


def test_of_an_epoch_each_row_was_read_once(page):
    """Steps 1 to 3 of the killed job and steps 4 to 7 of each restart read each of 100 rows once."""
    for lives in page.restarts.values():
        seen = page.rows_read(page.killed, slice(3)) + page.rows_read(lives, slice(4))
        assert seen == EVERY_ROW_ONCE
    assert page.rows_read(page.warned, slice(7)) == EVERY_ROW_ONCE


# Warned


def test_after_sigterm_to_one_both_end_normally_after_the_same_step(page):
    """Both end with code 0 after as many steps, with the same losses, and not at step 300."""
    assert [life.code for life in page.warned] == [0, 0]
    assert steps_of(page.warned[0]) == steps_of(page.warned[1])
    assert 9 <= len(steps_of(page.warned[0])) < 300


def test_the_step_that_they_agreed_on_is_saved_by_both(page):
    """It is the newest on disk, and both processes wrote their pieces."""
    last = len(steps_of(page.warned[0]))
    assert last == page.steps_on_disk("warned")[-1]
    written = (page.disk / "warned" / str(last)).glob("**/*.process_*")
    assert {path.name for path in written} == {"ocdbt.process_0", "ocdbt.process_1"}


def stop_together():
    """Steps that compute nothing; process 1 gets SIGTERM in its fifth."""
    from jax.experimental import multihost_utils

    number = jax.process_index()
    for n in range(1, 300):
        time.sleep(0.02)
        if n == 5 and number == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if multihost_utils.reached_preemption_sync_point(n):
            say("after step", n)
            break


def test_all_processes_stop_after_the_same_step_without_a_collective(page):
    """The function itself makes them agree: these processes compute nothing together."""
    lives = run(stop_together, 2, 1)
    assert lives[0].log[1] == lives[1].log[1]
    assert 5 <= int(lives[0].log[1].split()[-1]) < 300


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
