"""Deeper page to chapter 10, "Dropout inside `shard_map`: a random key of its own for each device"."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pages import check_exercise, exercises_of

PAGE = "10a-dropout"
P = jax.P


def outputs(draw, mesh):
    """64 equal rows after dropout: they differ by their masks alone."""
    mapped = jax.shard_map(draw, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    return jax.jit(mapped)(jax.random.key(0), jnp.ones((64, 32)))


def test_one_key_for_all_gives_eight_masks_and_a_folded_key_64(page):
    """Without the position, all devices draw the same masks for their 8 rows."""
    assert len(np.unique(outputs(page.dropout, page.mesh), axis=0)) == 8
    assert len(np.unique(outputs(page.dropout_by_device, page.mesh), axis=0)) == 64
    for draw, masks in ((page.dropout, 1), (page.dropout_by_device, 8)):  # one row on each device
        assert len(np.unique(page.on_rows(draw)(page.key, page.ones_BD), axis=0)) == masks


def test_masks_are_the_same_again_on_the_same_mesh_and_others_on_another(page):
    """A run that restarts on the same mesh draws the masks of the interrupted one."""
    auto, devices = (jax.sharding.AxisType.Auto,), jax.devices()[:4]
    four = jax.make_mesh((4,), ("data",), axis_types=auto, devices=devices)
    first, again, other = (outputs(page.dropout_by_device, m) for m in (page.mesh, page.mesh, four))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_two_layers_with_one_key_draw_the_same_mask_and_with_rngs_they_do_not(page):
    """By key, both calls draw alike; by `nnx.Rngs`, each call and each device has a mask of its own."""

    def by_one_key(key, x_block):
        layers = nnx.Dropout(0.5), nnx.Dropout(0.5)
        return tuple(layer(x_block, rngs=key) for layer in layers)

    alike = page.on_rows(by_one_key)(page.key, page.ones_BD)
    assert np.array_equal(*alike) and not np.array_equal(alike[0], page.ones_BD)
    both = np.concatenate([page.first_BD, page.second_BD])
    assert len(np.unique(both, axis=0)) == 16


def test_with_the_step_in_the_key_every_step_has_new_masks_and_a_step_the_same_again(page):
    """Eight rows in two layers: none has in step 4 the mask that any has in step 3."""
    steps = [page.on_rows(partial(page.two_layers, step=n))(page.key, page.ones_BD) for n in (3, 4)]
    assert np.array_equal(steps[0], (page.first_BD, page.second_BD))
    assert len(np.unique(np.concatenate([*steps[0], *steps[1]]), axis=0)) == 32


def on_grid(page, axes, spec, check=True):
    """Dropout with a key into which the positions along these axes are folded."""
    mapped = jax.shard_map(
        partial(page.dropout_along, axes),
        mesh=page.grid,
        in_specs=(P(), spec),
        out_specs=spec,
        check_vma=check,
    )
    return jax.jit(mapped)(jax.random.key(0), jnp.ones((64, 32)))


def copies_that_differ(page, axes):
    """For each block of rows, how many different copies of it the devices along `model` have."""
    blocks = {}
    for shard in on_grid(page, axes, P("data"), check=False).addressable_shards:
        blocks.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
    return [len(different) for different in blocks.values()]


def test_one_axis_too_many_makes_copies_differ(page):
    """Folded along `model` as well, devices with the same rows draw different masks."""
    assert len(np.unique(outputs(page.dropout_by_device, page.grid), axis=0)) == 64
    assert copies_that_differ(page, ("data",)) == [1, 1]
    assert copies_that_differ(page, ("data", "model")) == [4, 4]


def test_the_check_refuses_one_axis_too_many(page):
    """The message names the axis, and offers to disable the check."""
    with pytest.raises(ValueError, match="replicated across mesh axis 'model'") as caught:
        on_grid(page, ("data", "model"), P("data"))
    assert "check_vma=False" in str(caught.value)


def test_where_model_shards_the_features_it_belongs_in_the_key(page):
    """Else the four pieces of the features have the same masks."""

    def different(axes):
        dropped_BF = np.asarray(on_grid(page, axes, P("data", "model")))
        return len({part.tobytes() for part in np.split(dropped_BF, 4, axis=1)})

    assert different(("data",)) == 1 and different(("data", "model")) == 4


def test_under_jit_each_row_has_its_own_mask(page):
    """Under jax.jit the batch is one array."""
    sharding = jax.NamedSharding(page.mesh, P("data"))
    ones = jax.device_put(jnp.ones((64, 32)), sharding)
    dropped = jax.jit(page.dropout)(jax.random.key(0), ones)
    assert len(np.unique(dropped, axis=0)) == 64


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
