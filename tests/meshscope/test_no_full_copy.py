"""Proofs that no device ever held a whole array, and programs where one did."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

import meshscope as ms

P = jax.P
MESH = (2, 4)


def mesh_of(*sizes):
    return jax.make_mesh(sizes, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def leaf(shape, spec, mesh=None, dtype=jnp.float32):
    sharding = jax.NamedSharding(mesh or mesh_of(2, 4), spec)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def born(initializer, *leaves):
    """The compiled program that makes leaves from a key, each where it should lie."""

    def init(key):
        return [initializer(key, x.shape, x.dtype) for x in leaves]

    out = [x.sharding for x in leaves]
    return jax.jit(init, out_shardings=out).lower(jax.random.key(0)).compile()


@given(data=st.data())
@settings(max_examples=12, deadline=None, derandomize=True)
def test_normal_weights_are_born_in_pieces(data):
    mesh = mesh_of(*data.draw(st.sampled_from([(2, 4), (4, 2), (8, 1), (1, 8)]), "mesh"))
    spec = data.draw(
        st.sampled_from([P("data", "model"), P(("data", "model")), P(None, ("model", "data"))]),
        "spec",
    )
    w = leaf((8 * data.draw(st.integers(5, 9)), 8 * data.draw(st.integers(20, 30))), spec, mesh)
    compiled = born(jax.nn.initializers.lecun_normal(), w)
    ms.assert_no_full_copy(compiled, w)
    # The same program, asked about a weight that is whole on each device, has nothing to
    # prove; a program that gathers the weight has the full shape, and is caught.
    whole = leaf(w.shape, P(), mesh)
    with pytest.raises(ValueError, match="nothing to check"):
        ms.assert_no_full_copy(compiled, whole)
    gather = jax.jit(lambda x: x + 1, out_shardings=whole.sharding).lower(w).compile()
    with pytest.raises(AssertionError, match=r"full shape \(\d+, \d+\) in the program: "):
        ms.assert_no_full_copy(gather, w)


def test_orthogonal_weights_are_not():
    """The output is a piece; the full matrix is in the program all the same."""
    w = leaf((512, 512), P("model"))
    compiled = born(jax.nn.initializers.orthogonal(), w)
    assert ms.memory(compiled).outputs < 512 * 512 * 4 / 4 + 100
    with pytest.raises(AssertionError) as caught:
        ms.assert_no_full_copy(compiled, {"layer": {"kernel": w}})
    told = str(caught.value)
    assert told.startswith("layer.kernel has its full shape (512, 512) in the program: %")
    assert "[512,512]" in told and "\n" not in told and "metadata" not in told


@pytest.mark.parametrize(
    "copy",
    [
        lambda w: w.T,
        lambda w: w[None],
        lambda w: w.astype(jnp.bfloat16),
        lambda w: jnp.broadcast_to(w[:, None, :], (48, 3, 80)).sum(1),
    ],
)
def test_a_copy_is_a_copy_transposed_cast_or_expanded(copy):
    w = leaf((48, 80), P("data", "model"))
    whole = jax.NamedSharding(mesh_of(2, 4), P())
    compiled = jax.jit(copy, out_shardings=whole).lower(w).compile()
    with pytest.raises(AssertionError, match=r"the array has its full shape \(48, 80\)"):
        ms.assert_no_full_copy(compiled, w)


def test_the_limit_that_is_documented():
    """A copy in other dimensions passes; the bytes of the program tell."""
    w = leaf((48, 80), P("data", "model"))

    def flat(piece):
        return jax.lax.all_gather(piece.reshape(-1), ("data", "model"), tiled=True)

    mapped = jax.shard_map(
        flat, mesh=mesh_of(2, 4), in_specs=w.sharding.spec, out_specs=P(), check_vma=False
    )
    compiled = jax.jit(mapped).lower(w).compile()
    ms.assert_no_full_copy(compiled, w)
    assert ms.memory(compiled).outputs >= 48 * 80 * 4


def test_each_leaf_is_checked_and_whole_ones_are_not():
    mesh = mesh_of(2, 4)
    a, b = leaf((48, 80), P("data"), mesh), leaf((96, 112), P(None, "model"), mesh)
    bias = leaf((33,), P(), mesh)
    normal = jax.nn.initializers.normal()
    compiled = jax.jit(
        lambda key: {"a": normal(key, a.shape), "b": normal(key, b.shape), "bias": jnp.ones(33)},
        out_shardings={"a": a.sharding, "b": jax.NamedSharding(mesh, P()), "bias": bias.sharding},
    )
    compiled = compiled.lower(jax.random.key(0)).compile()
    ms.assert_no_full_copy(compiled, {"a": a, "bias": bias})
    with pytest.raises(AssertionError, match=r"^b has its full shape \(96, 112\)"):
        ms.assert_no_full_copy(compiled, {"a": a, "b": b, "bias": bias})


def test_a_piece_that_looks_like_another_whole_is_not_called_a_copy():
    """a's piece and b's whole are both (48, 80): shapes cannot tell which is which."""
    mesh = mesh_of(2, 4)
    a, b = leaf((96, 80), P("data"), mesh), leaf((48, 80), P("data"), mesh)
    compiled = born(jax.nn.initializers.normal(), a, b)
    with pytest.raises(ValueError, match=r"cannot tell whether this is 1, .* or a piece of 0"):
        ms.assert_no_full_copy(compiled, [a, b])


def test_flax_modules_are_trees():
    mesh = mesh_of(2, 4)
    metadata = {"out_sharding": ("data", "model")}

    def make():
        return nnx.Linear(48, 80, rngs=nnx.Rngs(0), kernel_metadata=metadata)

    with jax.set_mesh(mesh):
        compiled = jax.jit(make).lower().compile()
        model = jax.jit(make)()
        ms.assert_no_full_copy(compiled, model)
        ms.assert_no_full_copy(compiled, nnx.state(model))
        ms.assert_no_full_copy(compiled, model.kernel)
        ms.assert_no_full_copy(compiled, nnx.get_abstract_model(make, mesh)[1])
        gather = jax.jit(lambda m: m.kernel[...], out_shardings=jax.NamedSharding(mesh, P()))
        with pytest.raises(AssertionError, match=r"^kernel has its full shape \(48, 80\)"):
            ms.assert_no_full_copy(gather.lower(model).compile(), model)


def test_bad_arguments_say_what_to_pass():
    w = leaf((48, 80), P("data"))
    compiled = born(jax.nn.initializers.normal(), w)
    jitted = jax.jit(jnp.sin)
    for program, tree, error, says in [
        (jitted, w, TypeError, r"call .lower\(...\).compile\(\) first"),
        (jitted.lower(1.0), w, TypeError, r"call .compile\(\) first"),
        (len, w, TypeError, r"pass jax.jit\(f\).lower\(...\).compile\(\)"),
        (compiled, np.ones((48, 80)), TypeError, r"no array on devices: pass jax.device_put"),
        (compiled, [jax.ShapeDtypeStruct((4,), "int8")], TypeError, "without a sharding"),
        (compiled, jnp.ones((48, 80)), ValueError, "nothing to check"),
        (compiled, {}, ValueError, "nothing to check"),
    ]:
        with pytest.raises(error, match=says):
            ms.assert_no_full_copy(program, tree)
