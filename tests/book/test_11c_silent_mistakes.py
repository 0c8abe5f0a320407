"""The page "Two silent mistakes in the data": what it says is true."""

import numpy as np
import pytest

from many_devices.data import images_BI, labels_B, train
from many_devices.plain_fsdp import compiled_step, new_state
from pages import check_exercise, exercises_of

PAGE = "11c-silent-mistakes"


def lines(life):
    """What a process said, without the launcher's own lines."""
    return life.log[1:-1]


def test_without_the_global_shape_the_batch_doubles(page):
    """Each process passed all 16 rows, and the batch has 32: nothing is raised."""
    for life in page.silent_lives:
        assert life.code == 0 and lines(life)[0] == "without a shape: 32 rows"


def test_with_the_global_shape_it_has_16_rows(page):
    """With (16,) the batch has 16 rows even if each process passes all of them."""
    for life in page.silent_lives:
        assert lines(life)[1:] == ["with a shape: 16 rows, their sum 120"]


def test_every_row_twice_is_the_same_loss(page):
    """A step then works on every row twice: the same loss, for twice the work."""
    mesh = page.data_mesh()
    batch = images_BI[train][:64], labels_B[train][:64], np.ones(64, "float32")
    twice = tuple(np.concatenate([part, part]) for part in batch)
    step = compiled_step(mesh)
    losses = [step(*new_state(mesh), rows)[2] for rows in (batch, twice)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_copies_that_differ_are_called_replicated(page):
    """7 in one process and 8 in the other, and is_fully_replicated is True."""
    for value, life in zip((7, 8), page.copies_lives, strict=True):
        mine = f"mine: [{value}. {value}. {value}.]"
        assert lines(life) == ["is_fully_replicated: True", mine]


def test_assert_equal_finds_what_differs(page):
    """multihost_utils.assert_equal raises in both processes, and shows both values."""
    for life in page.check_lives:
        assert life.code == 1 and "AssertionError: seeds differ" in life.errors
        assert "[7 8]" in life.errors


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
