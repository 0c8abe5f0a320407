"""Proofs that no device ever held a whole array, and programs where one did."""

import gzip
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from effort import examples
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

import meshscope as ms

P = jax.P
FIXTURES = pathlib.Path(__file__).parent / "fixtures"


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
@settings(max_examples=examples(12), deadline=None, derandomize=True)
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
    with pytest.raises(AssertionError, match=r"the array \(\d+, \d+\) is whole in this program: "):
        ms.assert_no_full_copy(gather, w)


def test_orthogonal_weights_are_not():
    """The output is a piece; the full matrix is in the program all the same."""
    w = leaf((512, 512), P("model"))
    compiled = born(jax.nn.initializers.orthogonal(), w)
    assert ms.memory(compiled).outputs < 512 * 512 * 4 / 4 + 100
    with pytest.raises(AssertionError) as caught:
        ms.assert_no_full_copy(compiled, {"layer": {"kernel": w}})
    told = str(caught.value)
    assert told.startswith("layer.kernel (512, 512) is whole in this program: ")
    (line,) = told.split(": ", 1)[1].split("\n  ")  # one line of source makes all of them
    # what it is, whose operation, where it was written, how many, the first of them
    assert re.match(
        r"float32\[512,512\] by jit\(init\)/\S+, .* at test_no_full_copy.py:\d+, \d+ lines: ", line
    )
    assert re.search(r": (ROOT )?%\S+ = ", line) and "metadata" not in line
    copies = ms.full_copies(compiled, {"layer": {"kernel": w}})
    assert (
        f", {sum(len(row.lines) for row in copies)} lines: " in line and len(copies.grouped()) == 1
    )
    assert any(copy.op_name.endswith("geqrf") or "qr" in copy.op_name for copy in copies)


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
    with pytest.raises(AssertionError, match=r"the array \(48, 80\) is whole"):
        ms.assert_no_full_copy(compiled, w)


def gathered(change, w):
    """The program that gathers what `change` makes of each piece."""
    mapped = jax.shard_map(
        lambda piece: jax.lax.all_gather(change(piece), ("data", "model"), tiled=True),
        mesh=mesh_of(2, 4), in_specs=w.sharding.spec, out_specs=P(), check_vma=False,
    )  # fmt: skip
    return jax.jit(mapped).lower(w).compile()


@pytest.mark.parametrize("shape", [(-1,), (24 * 5, 4), (2, 3, 80)])
def test_a_copy_is_a_copy_in_any_shape(shape):
    w = leaf((48, 80), P("data", "model"))
    compiled = gathered(lambda piece: piece.reshape(shape), w)
    (copy,) = ms.full_copies(compiled, w)
    assert (copy.elements, copy.layer, copy.or_piece_of) == (48 * 80, False, None)
    assert copy.found != (48, 80) and math.prod(copy.found) == 48 * 80
    assert copy.op_name.endswith("all_gather")
    with pytest.raises(
        AssertionError, match=r"\(48, 80\) is whole .* by jit.*all_gather at test_no"
    ):
        ms.assert_no_full_copy(compiled, w)


def test_the_limit_that_is_documented():
    """A copy with padding passes; the bytes of the program tell."""
    w = leaf((48, 80), P("data", "model"))
    compiled = gathered(lambda piece: jnp.pad(piece.reshape(-1), (0, 1)), w)
    ms.assert_no_full_copy(compiled, w)
    assert ms.memory(compiled).outputs >= 48 * 80 * 4


INITIALISERS = {  # each makes the whole on every device, in other dimensions than the leaf's
    "f32[576,64] of a convolution": ((3, 3, 64, 64), P(None, None, "data", "model"),
                                     jax.nn.initializers.orthogonal()),
    "f32[256,256] of attention": ((256, 8, 32), P("data", "model"),
                                  lambda key, shape, dtype: jax.nn.initializers.orthogonal()(
                                      key, (256, 256), dtype).reshape(shape)),
    "f32[131072] sorted": ((256, 512), P("data", "model"),
                           lambda key, shape, dtype: jnp.sort(
                               jax.random.normal(key, (256 * 512,), dtype)).reshape(shape)),
}  # fmt: skip


@pytest.mark.parametrize("name", INITIALISERS)
def test_initialisers_that_make_the_whole_flat(name):
    shape, spec, initializer = INITIALISERS[name]
    w = leaf(shape, spec)
    compiled = born(initializer, w)
    assert ms.memory(compiled).temporaries > math.prod(shape) * 4  # it is really there
    with pytest.raises(AssertionError, match=r"the array \(.*\) is whole"):
        ms.assert_no_full_copy(compiled, w)


def stack_of(whole):
    """Four matrices made one by one, each whole on every device if `whole`."""
    mesh, normal = mesh_of(2, 4), jax.nn.initializers.normal()
    w = leaf((4, 96, 384), P(None, "data", "model"), mesh)
    where = jax.NamedSharding(mesh, P() if whole else P("data", "model"))

    def layer(_, key):
        made = normal(key, w.shape[1:])
        made = jax.lax.with_sharding_constraint(made, where)
        return None, made / jnp.linalg.norm(made)

    def init():
        return jax.lax.scan(layer, None, jax.random.split(jax.random.key(0), 4))[1]

    return jax.jit(init, out_shardings=w.sharding).lower().compile(), w


def test_a_layer_of_a_stack_is_a_copy_too():
    compiled, w = stack_of(whole=True)
    copies = ms.full_copies(compiled, {"blocks": w})
    assert {(copy.paths, copy.shape, copy.layer) for copy in copies} == {
        (("blocks",), (96, 384), True)
    }
    assert repr(copies).split("\n")[1].split() == [
        "leaf", "shape", "found", "lines", "operation", "source"]  # fmt: skip
    assert "one layer of blocks  (96, 384)  float32[96,384]" in repr(copies)
    with pytest.raises(AssertionError, match=r"^one layer of blocks \(96, 384\) is whole"):
        ms.assert_no_full_copy(compiled, {"blocks": w})
    ms.assert_no_full_copy(compiled, {"blocks": w}, stacked=False)  # the stack itself never was
    halves, w = stack_of(whole=False)
    ms.assert_no_full_copy(halves, {"blocks": w})
    assert repr(ms.full_copies(halves, w)) == "Nothing is whole on a device"


def test_a_first_dimension_that_is_split_makes_no_stack():
    """Each of 8 devices holds one expert's whole matrix, as it should."""
    w = leaf((8, 48, 80), P(("data", "model")))
    ms.assert_no_full_copy(born(jax.nn.initializers.normal(), w), w)


def test_a_matrix_is_no_stack_of_vectors():
    """A bias as long as a weight's rows is no copy of the weight."""
    w, b = leaf((4, 96), P(None, "model")), leaf((96,), P())
    compiled = jax.jit(lambda b: jnp.sin(b) + 1, out_shardings=b.sharding).lower(b).compile()
    assert not ms.full_copies(compiled, w)
    assert ms.full_copies(compiled, leaf((4, 24, 4), P(None, "model")))[0].layer, "but of a stack"


def step_with_activations():
    """A matmul whose output has as many elements, (64, 60), as the weight (48, 80)."""
    mesh = mesh_of(2, 4)
    w = leaf((48, 80), P(None, "model"), mesh)
    x = leaf((128, 48), P("data"), mesh)
    v = leaf((80, 60), P(), mesh)

    def step(x, w, v):
        h = jnp.tanh(x @ w)  # (128, 80): a device has (64, 20)
        return jnp.sin(h @ v).sum(), w * 0.5

    out = (jax.NamedSharding(mesh, P()), w.sharding)
    return jax.jit(step, out_shardings=out).lower(x, w, v).compile(), w


def test_activations_are_named_and_can_be_excluded():
    compiled, w = step_with_activations()
    copies = ms.full_copies(compiled, {"w": w})
    assert {copy.found for copy in copies} == {(64, 60)}
    assert all("dot" in copy.op_name or "sin" in copy.op_name for copy in copies)
    lines = {copy.source_line for copy in copies}
    assert len(lines) == 1 and all(line.startswith("test_no_full_copy.py:") for line in lines)
    with pytest.raises(AssertionError) as caught:
        ms.assert_no_full_copy(compiled, {"w": w})
    for copy in copies:
        name = copy.op_name.split("/")[-1]
        assert re.search(
            rf"float32\[64,60\] by .*\b{name}\b.* at {copy.source_line}", str(caught.value)
        )
    for exclude in [
        (64, 60),
        [(64, 60)],
        *lines,
        [*lines],
        ["*/dot_general", "*/sin"],
        "test_no_*:*",
    ]:
        ms.assert_no_full_copy(compiled, {"w": w}, exclude=exclude)
    with pytest.raises(AssertionError):  # the sine is left
        ms.assert_no_full_copy(compiled, {"w": w}, exclude="*/dot_general")


@pytest.mark.parametrize("idle", ["modle.py:12", (60, 64), "*/dot_genral", (64, 61)])
def test_an_exclusion_that_excludes_nothing_is_a_typing_error(idle):
    compiled, w = step_with_activations()
    with pytest.raises(ValueError, match="excludes nothing: give a pattern"):
        ms.full_copies(compiled, {"w": w}, exclude=[(64, 60), idle])


def test_brackets_in_the_name_of_an_operation_stand_for_themselves():
    line = (
        '  ROOT %r = f32[48,80]{1,0} copy-start-of-tomorrow(%p), metadata={op_name="f/scan[x]/mul"}'
    )
    text = made_up(line)
    w = leaf((48, 80), P("data"))
    ms.assert_no_full_copy(text, w, exclude="f/scan[x]/*")
    with pytest.raises(ValueError, match="excludes nothing"):
        ms.assert_no_full_copy(text, w, exclude="f/scanx/*")


def made_up(line):
    """A program of one argument and one more line."""
    return (
        "HloModule m, is_scheduled=true, num_partitions=8\n\n"
        "ENTRY %main (p: f32[24,80]) -> f32[48,80] {\n"
        f"  %p = f32[24,80]{{1,0}} parameter(0)\n{line}\n}}\n"
    )


@pytest.mark.parametrize(
    "line",
    [
        "  ROOT %weird.1 = f32[48,80]{1,0} strange op(%p",
        "  %weird.1 = f32[48,80]{1,0} all-gather(%p",
        "%weird (q: f32[48,80]) {",
        "something else",
    ],
)
def test_a_line_that_was_not_read_is_no_proof(line):
    w = leaf((48, 80), P("data"))
    assert not ms.full_copies(made_up("  ROOT %y = f32[24,80]{1,0} negate(%p)"), w)
    with pytest.raises(ValueError, match=r"1 line\(s\) of this program could not be read"):
        ms.assert_no_full_copy(made_up(line), w)


@pytest.mark.parametrize("text", ["hello", "module @jit_f {}", ""])
def test_a_text_that_is_no_program_is_no_proof(text):
    with pytest.raises(ValueError, match="this text is"):
        ms.assert_no_full_copy(text, leaf((48, 80), P("data")))


def test_an_argument_that_comes_in_whole_is_a_copy():
    mesh = mesh_of(2, 4)
    w, whole = leaf((48, 80), P("data"), mesh), leaf((48, 80), P(), mesh)
    compiled = jax.jit(lambda kernel: kernel + 1, out_shardings=w.sharding).lower(whole).compile()
    copies = ms.full_copies(compiled, w)
    assert "kernel" in {copy.op_name for copy in copies}


def test_the_largest_come_first_and_equal_leaves_are_named_together():
    mesh = mesh_of(2, 4)
    q, k, v = (leaf((48, 80), P("data"), mesh) for _ in range(3))
    big = leaf((96, 80), P("data"), mesh)
    whole = jax.NamedSharding(mesh, P())
    compiled = jax.jit(lambda q, big: (q * 2, big.T), out_shardings=whole).lower(q, big).compile()
    copies = ms.full_copies(compiled, {"q": q, "k": k, "v": v, "big": big})
    assert copies[0].paths == ("big",) and copies[0].elements == 96 * 80
    assert copies[-1].paths == ("k", "q", "v") and copies[-1].shape == (48, 80)
    assert [copy.elements for copy in copies] == sorted([copy.elements for copy in copies])[::-1]
    assert isinstance(copies[:1], ms.FullCopies) and copies[np.int64(0)] == copies[0]


def listed(lines, tree, computations="", **more):
    """The whole copies in a program of these lines, whose argument is f32[24,80]."""
    text = made_up(lines).replace("ENTRY", computations + "\nENTRY")
    return ms.full_copies(text, tree, **more)


def test_every_result_of_an_instruction_is_looked_at():
    """Whatever stands before it: something small, or what is excluded."""
    line = "  ROOT %y = (f32[2]{0}, f32[60,64]{1,0}, f32[48,80]{1,0}) custom-call(%p)"
    w = {"w": leaf((48, 80), P("data")), "v": leaf((60, 64), P("data"))}
    assert {row.found for row in listed(line, w)} == {(60, 64), (48, 80)}
    assert [row.found for row in listed(line, w, exclude=(60, 64))] == [(48, 80)]


def test_leaves_of_as_many_elements_are_told_apart_by_their_dimensions():
    w = {"w": leaf((48, 80), P("data")), "v": leaf((60, 64), P("data"))}
    for found, paths in [("1,60,64", ("v",)), ("80,1,48", ("w",)), ("3840", ("v", "w"))]:
        (row,) = listed(f"  ROOT %y = f32[{found}] negate(%p)", w)
        assert row.paths == paths, found


def test_twos_are_dimensions_and_ones_are_none():
    w = {"w": leaf((2, 8, 480), P(None, "data")), "v": leaf((4, 4, 480), P("data"))}
    (row,) = listed("  ROOT %y = f32[8,2,480] negate(%p)", w)
    assert row.paths == ("w",)


def test_the_piece_that_a_value_may_be_is_named_by_its_dimensions():
    """Two leaves have pieces of 3,840 elements; the value has the dimensions of the second."""
    tree = {
        "a": leaf((96, 80), P("data"), mesh_of(2, 4)),
        "b": leaf((120, 64), P("data"), mesh_of(2, 4)),
    }
    tree |= {"w": leaf((64, 60), P("data"), mesh_of(2, 4))}
    assert [row.or_piece_of for row in listed("  ROOT %y = f32[60,64] negate(%p)", tree)] == ["b"]
    assert [row.or_piece_of for row in listed("  ROOT %y = f32[3840] negate(%p)", tree)] == ["a"]


def test_a_stack_of_two_has_layers_and_a_stack_of_one_is_a_leaf():
    two, one = leaf((2, 48, 80), P(None, "data")), leaf((1, 48, 80), P(None, "data"))
    line = "  ROOT %y = f32[48,80]{1,0} negate(%p)"
    assert [row.layer for row in listed(line, two)] == [True]
    assert [row.layer for row in listed(line, one)] == [False]


def test_a_piece_of_a_layer_has_the_elements_of_a_layer_s_piece():
    mesh = mesh_of(2, 4)
    tree = {
        "v": leaf((2, 8), P("data"), mesh),
        "stack": leaf((3, 8, 16), P(None, "data", "model"), mesh),
    }
    (row,) = listed("  ROOT %y = f32[16]{0} negate(%p)", tree)
    assert (row.paths, row.or_piece_of) == (("v",), "stack")


INNER = (
    "%inner (q: f32[24,80]) -> f32[48,80] {\n  %q = f32[24,80]{1,0} parameter(0)\n"
    "  ROOT %c = f32[48,80]{1,0} pad(%q, %q)\n}\n\n"
)
OUTER = (
    "%outer (o: f32[24,80]) -> f32[48,80] {\n  %o = f32[24,80]{1,0} parameter(0)\n"
    "  ROOT %d = f32[48,80]{1,0} fusion(%o), calls=%inner\n}\n\n"
)


@pytest.mark.parametrize("computations", [INNER, INNER + OUTER, OUTER + INNER])
def test_a_copy_inside_what_is_called_has_the_name_of_the_caller(computations):
    target = "outer" if "outer" in computations else "inner"
    line = f'  ROOT %y = f32[48,80]{{1,0}} fusion(%p), calls=%{target}, metadata={{op_name="jit(f)/dot"}}'
    (row,) = listed(line, leaf((48, 80), P("data")), computations)
    assert row.op_name == "jit(f)/dot" and len(row.lines) == 1, "made once, whoever hands it on"


def test_a_value_that_is_handed_on_is_counted_where_it_is_made():
    lines = [
        "  %made = f32[48,80]{1,0} pad(%p, %p)",
        "  %seen = f32[80,48]{1,0} bitcast(%made)",
        "  %both = (f32[48,80]{1,0}, f32[80,48]{1,0}) tuple(%made, %seen)",
        "  ROOT %one = f32[48,80]{1,0} get-tuple-element(%both), index=0",
    ]
    (row,) = listed("\n".join(lines), leaf((48, 80), P("data")))
    assert len(row.lines) == 1 and "pad(" in row.lines[0]


@pytest.mark.parametrize("attribute", ["", ", calls=%nobody", ", to_apply=%nobody"])
def test_what_a_call_makes_counts_where_nothing_of_it_can_be_read(attribute):
    line = f"  ROOT %y = f32[48,80]{{1,0}} fusion(%p){attribute}"
    assert [row.found for row in listed(line, leaf((48, 80), P("data")))] == [(48, 80)]


def test_tpu_fully_sharded_step_gathers_a_layer_and_never_the_stack():
    """fixtures: two stacks of 4, gathered one layer at a time and kept for the way back."""
    text = gzip.decompress((FIXTURES / "tpu-fsdp.hlo.gz").read_bytes()).decode()
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    tree = {
        "w": leaf((4, 1024, 4096), P(None, "data"), mesh, jnp.bfloat16),
        "v": leaf((4, 4096, 1024), P(None, "data"), mesh, jnp.bfloat16),
    }
    kept = {copy.found for copy in ms.full_copies(text, tree) if not copy.layer}
    assert kept == {(4, 1024, 4096), (4, 4096, 1024)}  # saved by the scan for the backward pass
    gathers = [
        copy for copy in ms.full_copies(text, tree)
        if copy.layer and any(" all-gather(" in line for line in copy.lines)
    ]  # fmt: skip
    assert {copy.found for copy in gathers} == {(1, 1024, 4096), (1, 4096, 1024)}
    assert {copy.dtype for copy in gathers} == {"bfloat16"}
    assert all(copy.op_name.endswith("all_gather") for copy in gathers)
    assert all(copy.source_line.startswith("make_hlo_fixtures.py:") for copy in gathers)


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
    with pytest.raises(AssertionError, match=r"^b \(96, 112\) is whole"):
        ms.assert_no_full_copy(compiled, {"a": a, "b": b, "bias": bias})


def test_a_piece_that_looks_like_another_whole_is_not_called_a_copy():
    """a's piece and b's whole are both (48, 80): shapes cannot tell which is which."""
    mesh = mesh_of(2, 4)
    a, b = leaf((96, 80), P("data"), mesh), leaf((48, 80), P("data"), mesh)
    compiled = born(jax.nn.initializers.normal(), a, b)
    with pytest.raises(ValueError, match=r"cannot tell whether this is 1 .* or a piece of 0"):
        ms.assert_no_full_copy(compiled, [a, b])
    doubts = ms.full_copies(compiled, [a, b])
    assert {copy.or_piece_of for copy in doubts} == {"0"} and "1, or a piece of 0" in repr(doubts)
    gather = jax.jit(lambda b: b * 2, out_shardings=jax.NamedSharding(mesh, P())).lower(b).compile()
    with pytest.raises(ValueError, match="cannot tell"):  # no more here: it has both shapes
        ms.assert_no_full_copy(gather, [a, b])


def test_a_piece_with_as_many_elements_is_told_by_its_dimensions():
    """a's piece (60, 64) has as many elements as b, (48, 80)."""
    mesh = mesh_of(2, 4)
    a, b = leaf((120, 64), P("data"), mesh), leaf((48, 80), P("data"), mesh)
    ms.assert_no_full_copy(born(jax.nn.initializers.normal(), a, b), [a, b])
    whole = jax.NamedSharding(mesh, P())
    gather = jax.jit(lambda b: b * 2, out_shardings=whole).lower(b).compile()
    with pytest.raises(AssertionError, match=r"^1 \(48, 80\) is whole"):
        ms.assert_no_full_copy(gather, [a, b])
    with pytest.raises(ValueError, match="cannot tell whether this is 1 .* or a piece of 0"):
        ms.assert_no_full_copy(made_up("  ROOT %y = f32[3840]{0} iota()"), [a, b])


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
        with pytest.raises(AssertionError, match=r"^kernel \(48, 80\) is whole"):
            ms.assert_no_full_copy(gather.lower(model).compile(), model)


def test_bad_arguments_say_what_to_pass():
    w = leaf((48, 80), P("data"))
    compiled = born(jax.nn.initializers.normal(), w)
    jitted = jax.jit(jnp.sin)
    for program, tree, error, says in [
        (jitted, w, TypeError, r"call .lower\(...\).compile\(\) first"),
        (jitted.lower(1.0), w, TypeError, r"call .compile\(\) first"),
        (len, w, TypeError, r"pass jax.jit\(f\).lower\(...\).compile\(\)"),
        (compiled, np.ones((48, 80)), TypeError, r"not an array on devices: pass jax.device_put"),
        (compiled, [jax.ShapeDtypeStruct((4,), "int8")], TypeError, "without a sharding"),
        (compiled, jnp.ones((48, 80)), ValueError, "nothing to check"),
        (compiled, {}, ValueError, "no leaves"),
        (compiled, None, ValueError, "no leaves"),
    ]:
        with pytest.raises(error, match=says):
            ms.assert_no_full_copy(program, tree)


# In a training step


@pytest.fixture(scope="module")
def training():
    """A step of two layers and a bias, in which every weight is gathered, and its weights."""
    mesh = mesh_of(8, 1)
    tree = {
        "up": leaf((80, 208), P("data"), mesh),
        "down": leaf((208, 80), P("data"), mesh),
        "bias": leaf((48,), P("data"), mesh),
    }

    def loss(tree, x):
        h = jax.nn.relu(x @ tree["up"].astype(jnp.bfloat16).astype(jnp.float32))
        y = (h @ tree["down"])[:, :48] + tree["bias"]
        return (jax.lax.with_sharding_constraint(y, jax.NamedSharding(mesh, P("data"))) ** 2).sum()

    def step(tree, x):
        return jax.tree.map(lambda w, g: w - g, tree, jax.grad(loss)(tree, x))

    out = {name: w.sharding for name, w in tree.items()}
    return jax.jit(step, out_shardings=out).lower(
        tree, leaf((24, 80), P("data"), mesh)
    ).compile(), tree


def test_one_row_for_each_shape_and_line_of_source(training):
    copies = ms.full_copies(*training)
    grouped = copies.grouped()
    assert len(grouped) < len(copies) and len(grouped) == len(grouped.grouped())
    keys = [(row.paths, tuple(sorted(row.found)), row.source_line) for row in grouped]
    assert len(set(keys)) == len(keys)
    lines = [line for row in grouped for line in row.lines]
    assert sorted(lines) == sorted(line for row in copies for line in row.lines), "none is lost"
    assert len(repr(grouped).splitlines()) == len(grouped) + 2


def test_the_error_has_a_line_for_each_of_them_the_largest_first(training):
    with pytest.raises(AssertionError) as caught:
        ms.assert_no_full_copy(*training)
    grouped = ms.full_copies(*training).grouped()
    lines = str(caught.value).split(": ", 1)[1].split("\n  ")
    assert len(lines) == min(len(grouped), 5) + (len(grouped) > 5)
    for row, line in zip(grouped, lines[:5]):
        assert re.match(rf"\w+\[{','.join(map(str, row.found))}\]", line)
        assert row.source_line is None or f" at {row.source_line}" in line
    assert [row.elements for row in grouped] == sorted(
        (row.elements for row in grouped), reverse=True
    )
    if len(grouped) > 5:
        assert lines[-1] == f"and {len(grouped) - 5} more, which full_copies(...).grouped() lists"


def test_small_leaves_may_be_left_out(training):
    paths = {path for row in ms.full_copies(*training) for path in row.paths}
    assert "bias" in paths
    for least, there in [(48 * 4, True), (48 * 4 + 1, False)]:
        found = ms.full_copies(*training, min_bytes=least)
        assert ("bias" in {path for row in found for path in row.paths}) == there
        assert any("up" in row.paths for row in found)
    with pytest.raises(AssertionError, match="up"):
        ms.assert_no_full_copy(*training, min_bytes=1000)
    with pytest.raises(
        ValueError, match="nothing to check, .* or smaller than min_bytes=1,000,000: pass"
    ):
        ms.assert_no_full_copy(*training, min_bytes=10**6)


def test_the_leaf_s_own_shape_comes_before_another_of_as_many_elements():
    lines = "  %a = f32[3840] negate(%p)\n  ROOT %b = f32[48,80] negate(%p)"
    assert [row.found for row in listed(lines, leaf((48, 80), P("data")))] == [(48, 80), (3840,)]


def test_operations_of_a_line_are_named_by_their_last_part_and_not_at_any_length():
    """One name in full, then what else is done there, each once; a fusion may join hundreds of names."""
    names = ["jit(f)/dot", "jit(f)/jvp/dot", "jit(f)/sin", "jit(f)/" + 100 * "x"]
    lines = "\n".join(
        f'  %y{n} = f32[48,80] negate(%p), metadata={{op_name="{name}" source_file="a.py" source_line=7}}'
        for n, name in enumerate(names)
    )
    with pytest.raises(AssertionError) as caught:
        ms.assert_no_full_copy(made_up(lines), leaf((48, 80), P("data")))
    told = f"float32[48,80] by jit(f)/dot, sin, {80 * 'x'}... at a.py:7, 4 lines: "
    assert told in str(caught.value)
