"""The page "How often to save"."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from pages import check_exercise, exercises_of

PAGE = "05f-how-often-to-save"
BETWEEN = 54 * 24 * 60 / 419  # minutes from one failure to the next


def test_what_is_lost_with_an_hour_between_two_saves():
    """The pauses take 0.8 % of the time, and a failure each 186 minutes loses 23 % of it."""
    assert round(BETWEEN) == 186
    assert (f"{0.5 / 60:.1%}", f"{(60 / 2 + 2 + 10) / BETWEEN:.0%}") == ("0.8%", "23%")


def test_youngs_formula_finds_the_smallest_lost_share(page):
    """√(2 · 0.5 · 186) = 13.6 minutes is the smallest of all intervals in steps of a tenth."""
    by_formula = math.sqrt(2 * 0.5 * BETWEEN)
    assert f"{by_formula:.1f}" == f"{page.best:.1f}" == "13.6"
    assert page.lost(page.best) == min(page.lost(page.minutes)) < page.lost(60)


def test_near_the_minimum_the_lost_share_changes_little(page):
    """7 or 28 minutes instead of 14 cost about two percentage points more."""
    for interval in (7, 28):
        assert 0.015 < page.lost(interval) - page.lost(14) < 0.0205


def test_with_a_pause_of_a_second_the_best_interval_is_two_and_a_half_minutes(page):
    """Most of what is lost is then W + R, 6.5 %."""
    assert f"{page.best_now:.1f}" == f"{math.sqrt(2 * BETWEEN / 60):.1f}" == "2.5"
    assert f"{(2 + 10) / BETWEEN:.1%}" == "6.5%"
    assert (2 + 10) / BETWEEN > min(page.shares) / 2


def test_for_random_failures_the_best_of_five_intervals_is_that_of_the_formula(page):
    """Failures drawn at random lose what the formula says, to 2.5 points, and least at 14 minutes."""
    works = np.random.default_rng(0).exponential(BETWEEN, 200_000)  # minutes from start to failure
    shares = []
    for interval in (5, 7, 14, 28, 60):
        able = np.maximum(works - 10 - 2, 0)  # after a restart, until the last complete save
        done = able // (interval + 0.5) * interval
        shares.append(1 - done.sum() / works.sum())
        assert abs(shares[-1] - page.lost(interval)) < 0.025
    assert shares.index(min(shares)) == 2


def test_compiled_programs_can_be_kept_on_disk(tmp_path):
    """`jax_compilation_cache_dir` keeps the compiled programs in a cache on disk."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    try:
        for name, value in zip(names, (str(tmp_path), 0.0)):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        jax.jit(lambda x: jnp.sin(x) @ x.T).lower(jnp.ones((8, 8))).compile()
        assert any(tmp_path.iterdir())
    finally:
        for name, value in zip(names, before):
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
