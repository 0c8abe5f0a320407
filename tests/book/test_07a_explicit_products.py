"""The page "Explicit mode: the sharding of products"."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import meshscope as ms
from many_devices.compiled import stored_program
from many_devices.helpers import attempt, put, traffic, type_of
from pages import check_exercise, compiled_for_cpu, exercises_of

PAGE = "07a-explicit-products"
P = jax.P
SPECS = [
    (None, None),
    ("data", None),
    ("model", None),
    (None, "data"),
    (None, "model"),
    ("data", "model"),
    ("model", "data"),
]
PAIRS = list(itertools.product(SPECS, SPECS))
MESH = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
STRICT = jax.__version_info__ >= (0, 11, 1)  # about the batch dimensions of a product
ALIKE = "batch dimensions .* to have the same sharding"


def message(function, *inputs):
    """What JAX raises, on one line."""
    return " ".join(attempt(function, *inputs).split())


def like(shape, *spec):
    return jax.ShapeDtypeStruct(shape, "float32", sharding=jax.NamedSharding(MESH, P(*spec)))


def spec_of(function, *inputs):
    with jax.set_mesh(None):  # the page leaves its own mesh set
        return jax.eval_shape(function, *inputs).sharding.spec


def on(page, shape, *spec):
    return put(np.ones(shape, "float32"), page.mesh, *spec)


# Products


def test_jax_agrees_with_the_rule_on_49_products(page):
    """The spec of every product, or that it raises; and where rows and columns go."""
    assert len(set(PAIRS)) == 49
    predicted = {pair: page.product_spec(*pair) for pair in PAIRS}
    assert predicted == {pair: page.jax_says(*pair) for pair in PAIRS}
    assert predicted[("data", None), (None, "model")] == ("data", "model")


def test_the_rule_holds_for_both_axes_on_one_dimension(page):
    """A dimension that is sharded along data and model together collides with each of them."""
    together = ("data", "model")
    for pair in [
        ((together, None), (None, "data")),
        (("data", None), (None, together)),
        ((together, None), (None, None)),
        ((None, together), (None, "model")),
    ]:
        assert page.product_spec(*pair) == page.jax_says(*pair)
    assert "64@(data,model)" in str(jax.typeof(on(page, (64, 8), together)))


def test_22_products_raise_and_out_sharding_fixes_each(page):
    """JAX raises a ShardingTypeError; told the sharding of the result, it accepts all of them."""
    raising = [pair for pair in PAIRS if page.product_spec(*pair) == "raises"]
    assert len(raising) == 22

    def told(a_IJ, b_JK):
        return jnp.dot(a_IJ, b_JK, out_sharding=P(None, None))

    for pair in raising:
        inputs = [page.abstract(spec) for spec in pair]
        assert message(jnp.dot, *inputs).startswith("ShardingTypeError")
        assert type_of(told, *inputs) == "float32[64,64]"


@compiled_for_cpu
def test_of_27_accepted_products_the_20_of_case_2_move_something(page):
    """Compiled for CPU: a product is free if its contracted dimension is whole in both."""
    accepted = [pair for pair in PAIRS if page.product_spec(*pair) != "raises"]
    case_2 = [pair for pair in accepted if pair[0][1] or pair[1][0]]
    inputs = {pair: [page.abstract(spec) for spec in pair] for pair in accepted}
    costly = [pair for pair in accepted if traffic(jnp.dot, *inputs[pair], mesh=page.mesh)]
    assert costly == case_2
    assert (len(accepted), len(costly)) == (27, 20)


@compiled_for_cpu
def test_on_the_row_xla_slices_b_and_on_two_axes_it_gathers_a(page):
    """Compiled for CPU: a quarter of the work for 73,728 bytes, or all of it for 98,304."""
    assert page.row_price == ("all-reduce", 73_728, 0.25)
    assert page.both_price == ("all-gather", 3 * page.a_host.nbytes // 4, 1)
    assert page.both_price[1] == 98_304
    assert type_of(page.product, *page.on_both) == f"float32[{page.I},{page.K}]"


@compiled_for_cpu
def test_on_the_row_the_product_costs_what_slicing_b_costs(page):
    """Compiled for CPU: written with jax.reshard, it is the same program."""

    def slice_b(a_IJ, b_JK):
        return jnp.dot(a_IJ, jax.reshard(b_JK, P("X", None)), out_sharding=P(None, None))

    with jax.set_mesh(page.row):
        assert page.price("sliced", slice_b, *page.on_row) == page.row_price


@compiled_for_cpu
def test_reshard_writes_the_way_down(page):
    """With B sliced on the mesh of 2 x 4, a device does a quarter of the work, for fewer bytes."""
    assert page.sliced_price == page.row_price
    plain, sliced = (jax.jit(f)(*page.on_both) for f in (page.product, page.slice_b))
    np.testing.assert_allclose(sliced, plain, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("compiler", ["gpu", "tpu", "cpu"])
def test_the_compilers_for_h100_and_tpu_choose_the_same(compiler):
    """The stored programs: an all-reduce on the row, an all-gather on the mesh of two axes."""
    for name, kind, size in [("plain", "all-reduce", 73_728), ("both", "all-gather", 98_304)]:
        moves = stored_program(f"case-2-{name}")[compiler]["moves"]
        assert [(move["kind"], move["wire"]) for move in moves] == [(kind, size)]


# Sums, for the exercise


@compiled_for_cpu
def test_adding_something_whole_is_free(page):
    """A vector or a matrix that is whole takes the sharding of the other operand; nothing moves."""
    v_X, v = on(page, (64,), "data"), on(page, (64,), None)
    columns = on(page, (16, 64), None, "model")
    for one, other, expected in [
        (v_X, v, "float32[64@data]"),
        (on(page, (16, 64), None, None), columns, "float32[16,64@model]"),
        (on(page, (16, 64), "data", None), columns, "float32[16@data,64@model]"),
    ]:
        assert type_of(jnp.add, one, other) == expected
        assert not traffic(jnp.add, one, other, mesh=page.mesh)


# Attention


def test_batch_dimensions_that_are_sharded_along_different_axes_raise(page):
    """A batched product is sharded like its batch, and raises if the operands differ in it."""

    def scores(q_BSC, k_BTC):
        return jnp.einsum("BSC,BTC->BST", q_BSC, k_BTC)

    q_BSC, k_BTC = on(page, (8, 8, 8), "data", "model", None), on(page, (8, 8, 8), "data")
    assert type_of(scores, q_BSC, k_BTC) == "float32[8@data,8@model,8]"
    said = message(scores, q_BSC, on(page, (8, 8, 8), "model"))
    assert said.startswith("ShardingTypeError: dot_general requires lhs batch")


def heads(queries, keys):
    return jnp.einsum("bshc,bthc->bhst", queries, keys)


def test_batch_dimensions_must_be_sharded_alike_since_jax_0_11_1():
    """A product whose batch dimensions are not sharded alike raises; JAX before 0.11.1 took it."""
    queries, keys = like((8, 16, 4, 8), "data", None, "model"), like((8, 16, 4, 8), "data")
    if STRICT:
        with pytest.raises(Exception, match=ALIKE):
            spec_of(heads, queries, keys)
    else:
        assert spec_of(heads, queries, keys)[:2] == ("data", "model")
    assert spec_of(heads, queries, queries) == P("data", "model", None, None)


def test_the_keys_of_the_page_are_not_sharded_like_its_queries(page):
    """Scores of its queries and its whole keys raise; of queries and queries they do not."""
    if STRICT:
        with pytest.raises(Exception, match=ALIKE):
            jax.eval_shape(page.scores, page.q_BSHC, page.k_BTHC)
    found = type_of(page.scores, page.q_BSHC, page.q_BSHC)
    assert found == "float32[8@data,4@model,16,16]"


def test_resharded_keys_or_keys_without_heads_are_accepted(page):
    """Both give scores by examples and heads, and the same values."""
    keys = page.k_BTC, np.repeat(np.asarray(page.k_BTC)[:, :, None], 4, axis=2)
    with_heads = put(keys[1], page.mesh, "data")
    for function, given in [(page.resharded, page.k_BTHC), (page.without_heads, page.k_BTC)]:
        assert type_of(function, page.q_BSHC, given) == "float32[8@data,4@model,16,16]"
    one = jax.jit(page.resharded)(page.q_BSHC, with_heads)
    np.testing.assert_allclose(one, jax.jit(page.without_heads)(page.q_BSHC, keys[0]))


@compiled_for_cpu
def test_resharding_whole_keys_moves_nothing(page):
    """Every device has all keys, so it keeps those of its heads."""
    assert not traffic(page.resharded, page.q_BSHC, page.k_BTHC)
    assert not traffic(page.without_heads, page.q_BSHC, page.k_BTC)


@compiled_for_cpu
def test_the_other_products_of_attention_are_accepted_and_move_nothing(page):
    """Into the heads, scores and mixed values, where examples and heads are sharded alike."""
    x_BSD = put(np.ones((8, 16, 32), "float32"), page.mesh, "data")
    w_DHC = put(np.ones((32, 4, 8), "float32"), page.mesh, None, "model")
    scores_BHST = put(np.ones((8, 4, 16, 16), "float32"), page.mesh, "data", "model")
    q_BSHC = page.q_BSHC
    for formula, left, right, expected in [
        ("BSD,DHC->BSHC", x_BSD, w_DHC, "float32[8@data,16,4@model,8]"),
        ("BSHC,BTHC->BHST", q_BSHC, q_BSHC, "float32[8@data,4@model,16,16]"),
        ("BHST,BTHC->BSHC", scores_BHST, q_BSHC, "float32[8@data,16,4@model,8]"),
    ]:
        product = functools.partial(jnp.einsum, formula)
        assert type_of(product, left, right) == expected
        assert not traffic(product, left, right)


def test_from_the_heads_back_to_the_width_is_row_parallel(page):
    """The last product of attention sums over heads, which are sharded in both operands."""
    w_HCD = put(np.ones((4, 8, 32), "float32"), page.mesh, "model")
    back_to_width = functools.partial(jnp.einsum, "BSHC,HCD->BSD")
    said = message(back_to_width, page.q_BSHC, w_HCD)
    assert said.startswith("ShardingTypeError: Contracting dim")
    fixed = functools.partial(back_to_width, out_sharding=P("data", None, None))
    assert type_of(fixed, page.q_BSHC, w_HCD) == "float32[8@data,16,32]"


def by_the_rules(formula, *specs):
    """The spec of a product by the table's rules, "raises", or "whole beside sharded"."""
    inputs, kept = formula.split("->")
    entries = {}  # of each letter, in every operand that has it
    for letters, spec in zip(inputs.split(","), specs):
        for letter, axis in zip(letters, spec):
            entries.setdefault(letter, []).append(axis)
    for letter, axes in entries.items():
        sharded = [axis for axis in axes if axis]
        if letter not in kept and len(sharded) > 1:  # contracted, sharded in both
            return "raises"
        if letter in kept and len(set(sharded)) > 1:  # along two different axes
            return "raises"
    if any(len(set(entries[letter])) > 1 for letter in kept):
        return "whole beside sharded"
    result = [entries[letter][0] for letter in kept]
    named = [axis for axis in result if axis]
    return P(*result) if len(named) == len(set(named)) else "raises"


def by_jax(formula, *specs):
    pair = [like((8,) * len(spec), *spec) for spec in specs]
    try:
        return spec_of(functools.partial(jnp.einsum, formula), *pair)
    except Exception as error:
        assert type(error).__name__ == "ShardingTypeError"
        return "raises"


def test_the_rules_of_einsum_agree_with_jax_on_88_pairs_of_shardings():
    """A letter that is kept must be sharded alike in both, a contracted one in one at most."""

    def specs_of(letters):
        choices = itertools.product([None, "data", "model"], repeat=len(letters))
        return [s for s in choices if len(set(s) - {None}) == len(s) - s.count(None)]

    tried = raised = 0
    for formula in ("ab,ab->ab", "bd,d->b", "b,b->", "b,c->bc"):
        left, right = formula.split("->")[0].split(",")
        for specs in itertools.product(specs_of(left), specs_of(right)):
            said, found = by_the_rules(formula, *specs), by_jax(formula, *specs)
            if said == "whole beside sharded":
                said = "raises" if STRICT else found
            assert found == said, (formula, specs)
            tried += 1
            raised += said == "raises"
    assert tried == 88 and (raised == 56 if STRICT else raised < 56)


def test_the_collectives_are_read_from_the_program(page):
    """price returns the kinds of the compiled program."""
    program = jax.jit(page.product).lower(*page.on_both).compile()
    assert ms.collectives(program).kinds == {page.both_price[0]}


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
