"""What a program may communicate, in one line: exact, at most, about, and the message otherwise."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import meshscope as ms

P = jax.P
MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
W = 64 * 128 * 4  # bytes of a weight


def shape(spec, *dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=jax.NamedSharding(MESH, spec))


def sharded(x, *spec):
    return jax.lax.with_sharding_constraint(x, jax.NamedSharding(MESH, P(*spec)))


@pytest.fixture(scope="module")
def program():
    """Gathers a weight over data, and sums a batch of 8 x 128 numbers over model."""

    def f(x, w, v):
        return sharded(x @ v, None, None), sharded(w, None, None)

    args = shape(P(None, "model"), 8, 64), shape(P("data"), 64, 128), shape(P("model"), 64, 128)
    return jax.jit(f).lower(*args).compile()


BOTH = {("all-gather", "data"): W, ("all-reduce", "model"): 8 * 128 * 4}


def test_what_is_as_expected_passes(program):
    ms.expect(program, BOTH)
    ms.expect(program, {("all-gather", ("data",)): W, ("all-reduce", "model"): ms.at_most(5000)})
    ms.expect(program, {**BOTH, ("all-to-all", "data"): 0})
    ms.expect(ms.collectives(program), BOTH)
    ms.expect(program.as_text(), BOTH, MESH)


@pytest.mark.parametrize("found, passes", [(W - 1, False), (W, True), (W + 1, False)])
def test_a_number_is_exact(program, found, passes):
    expected = {**BOTH, ("all-gather", "data"): found}
    if passes:
        return ms.expect(program, expected)
    with pytest.raises(AssertionError, match=f"{W:,} bytes, expected {found:,} bytes"):
        ms.expect(program, expected)


@pytest.mark.parametrize(
    "bound, passes",
    [
        (ms.at_most(W), True),
        (ms.at_most(W - 1), False),
        (ms.about(W / 0.96), True),
        (ms.about(W / 0.94), False),
        (ms.about(W / 1.04), True),
        (ms.about(W / 1.06), False),
        (ms.about(2 * W, 0.5), True),
    ],
)
def test_bounds(program, bound, passes):
    expected = {**BOTH, ("all-gather", "data"): bound}
    if passes:
        return ms.expect(program, expected)
    with pytest.raises(AssertionError, match=re.escape(str(bound))):
        ms.expect(program, expected)


def test_the_message_names_kind_axis_bytes_and_line(program):
    with pytest.raises(AssertionError) as caught:
        ms.expect(program, {("all-gather", "model"): 10, ("all-reduce", "model"): 10})
    head, *lines = str(caught.value).splitlines()
    assert head == "this program does not communicate what was expected"
    assert lines[0] == "  - all-gather over model: nothing, expected 10 bytes"
    here = r"from test_expect.py:\d+"
    assert re.fullmatch(
        rf"  ~ all-reduce over model: 4,096 bytes, expected 10 bytes; {here}", lines[1]
    )
    assert re.fullmatch(
        rf"  \+ all-gather over data: {W:,} bytes, not expected; (from w|{here})", lines[2]
    )


def test_what_is_not_listed_may_be_allowed(program):
    one = {("all-gather", "data"): W}
    with pytest.raises(AssertionError, match="all-reduce over model: 4,096 bytes, not expected"):
        ms.expect(program, one)
    ms.expect(program, one, others=True)
    ms.expect(program, {}, others=True)


def test_no_communication_is_an_empty_list():
    quiet = jax.jit(lambda x: x + 1).lower(shape(P("data"), 8, 16)).compile()
    ms.expect(quiet, {})
    with pytest.raises(AssertionError, match="- all-gather over data: nothing"):
        ms.expect(quiet, {("all-gather", "data"): 1})


def test_a_collective_among_single_devices_moves_nothing():
    text = """HloModule jit_f, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (v: f32[64]) -> f32[64] {
  %v = f32[64] parameter(0)
  ROOT %r = f32[64] all-reduce(%v), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
}
"""
    ms.expect(text, {}, MESH)
    with pytest.raises(
        AssertionError, match="all-reduce over data, model: 256 bytes, not expected"
    ):
        ms.expect(text.replace("{0},{1},{2},{3},{4},{5},{6},{7}", "{0,1,2,3,4,5,6,7}"), {}, MESH)


def test_axes_come_in_any_order():
    total = jax.jit(lambda x: x.sum(0)).lower(shape(P(("data", "model")), 8, 16)).compile()
    for axes in (("data", "model"), ("model", "data")):
        ms.expect(total, {("all-reduce", axes): 64})


def test_a_loop_is_counted_by_its_turns_and_named():
    def f(x, w):
        return jax.lax.scan(lambda x, w: (sharded(x @ w, None, None), None), x, w)[0]

    args = shape(P(None, "model"), 8, 64), shape(P(None, "model"), 3, 64, 64)
    program = jax.jit(f).lower(*args).compile()
    moved = ms.collectives(program).by("kind", "axes")
    expected = {key: total.payload_bytes for key, total in moved.items()}
    ms.expect(program, expected)
    with pytest.raises(AssertionError, match=r"from test_expect.py:\d+ in a loop"):
        ms.expect(program, {})


def test_an_unknown_number_of_times_is_never_as_expected():
    def f(x):
        return jax.lax.while_loop(lambda x: x[0, 0] < 1e9, lambda x: x + sharded(x.sum(0), None), x)

    program = jax.jit(f).lower(shape(P("data"), 8, 16)).compile()
    keys = ms.collectives(program).by("kind", "axes")
    with pytest.raises(AssertionError, match="an unknown number of bytes"):
        ms.expect(program, dict.fromkeys(keys, ms.at_most(10**12)))


@pytest.mark.parametrize(
    "key, says",
    [
        (("all-gathers", "data"), "no kind 'all-gathers'"),
        (("all-gather", "modle"), "no axis 'modle'"),
        ("all-gather", "is not a kind and its axes"),
        (("all-gather",), "is not a kind and its axes"),
    ],
)
def test_what_does_not_exist_is_an_error(program, key, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        ms.expect(program, {key: 0})
