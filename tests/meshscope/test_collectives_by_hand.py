"""Programs as people write them, with answers counted by hand in the comments.

They were written after the parser, and nothing here was read off its output. All values
are float32, four bytes each.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType

import meshscope as ms

pytestmark = pytest.mark.filterwarnings("error::meshscope.UnparsedCollectiveWarning")
P = jax.P


def mesh_of(**axes):
    types = (AxisType.Explicit,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)


def moved(f, mesh, *inputs, outs, check_vma=True):
    """Totals by kind and axes of f under shard_map; inputs are (global shape, spec)."""
    specs = tuple(spec for _, spec in inputs)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=check_vma)
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec))
        for shape, spec in inputs
    ]
    return ms.collectives(jax.jit(mapped).lower(*shapes).compile()).by("kind", "axes")


def test_tensor_parallel_training_step():
    """Three blocks on 2 data x 4 model devices: columns of w, then rows of v, are split."""
    mesh = mesh_of(data=2, model=4)

    def step(w, v, x):
        def block(h, wv):
            return lax.psum(jax.nn.relu(h @ wv[0]) @ wv[1], "model"), None

        def loss(w, v):
            h, _ = lax.scan(block, x, (w, v))
            return lax.pmean((h**2).mean(), "data")

        return jax.value_and_grad(loss, (0, 1))(w, v)

    columns, rows = P(None, None, "model"), P(None, "model", None)
    table = moved(
        step,
        mesh,
        ((3, 16, 32), columns),
        ((3, 32, 16), rows),
        ((8, 16), P("data")),
        outs=(P(), (columns, rows)),
    )
    # model: a block sums its output forward, and the gradient of its input backward. Both
    #   are the local activation, 8/2 x 16 values = 256 bytes. 2 x 3 blocks x 256 = 1536.
    # data: the weights are the same on both data devices, so their gradients are summed:
    #   16 x 32/4 values = 512 bytes for w, as many for v, 3 blocks: 3072; and the loss, 4.
    assert table.bytes("all-reduce", "model") == 1536
    assert table.bytes("all-reduce", "data") == 3076
    assert len(table) == 2
    # On a ring of 4, 2 x 3/4 of the payload; on a ring of 2, 2 x 1/2 of it.
    assert table.wire("all-reduce", "model") == 2304
    assert table.wire("all-reduce", "data") == 3076


def test_fully_sharded_training_step_that_gathers_twice():
    """Three blocks on 8 devices; each gathers its weight, and again on the way back."""
    mesh = mesh_of(data=8)

    def step(w, x):
        @jax.checkpoint
        def block(h, piece):
            whole = lax.all_gather(piece, "data", axis=1, tiled=True)
            return jnp.tanh(h @ whole), None

        def loss(w):
            h, _ = lax.scan(block, x, w)
            return lax.pmean((h**2).mean(), "data")

        return jax.value_and_grad(loss)(w)

    split = P(None, None, "data")
    table = moved(step, mesh, ((3, 32, 32), split), ((16, 32), P("data")), outs=(P(), split))
    # All weights are 3 x 32 x 32 x 4 = 12288 bytes. They are gathered once forward and
    # once backward (the block is recomputed), and their gradients are scattered once.
    assert table.bytes("all-gather", "data") == 24576
    assert table.bytes("reduce-scatter", "data") == 12288
    assert table.bytes("all-reduce", "data") == 4  # the loss
    assert len(table) == 3
    # 3 P (n - 1)/n with P = 12288 and n = 8: 3 x 12288 x 7/8 = 32256.
    assert table.wire("all-gather", "data") + table.wire("reduce-scatter", "data") == 32256


def test_a_matmul_that_passes_its_pieces_round():
    """Each of 8 devices multiplies the piece it holds and hands it to the next."""
    mesh = mesh_of(x=8)

    def f(a, b):
        me = lax.axis_index("x")

        def turn(i, state):
            total, piece = state
            columns = lax.dynamic_slice_in_dim(a, ((me - i) % 8) * 4, 4, 1)
            total = total + columns @ piece
            return total, lax.ppermute(piece, "x", [(j, (j + 1) % 8) for j in range(8)])

        start = lax.pcast(jnp.zeros((2, 24)), "x", to="varying")
        return lax.fori_loop(0, 8, turn, (start, b))[0]

    table = moved(f, mesh, ((16, 32), P("x")), ((32, 24), P("x")), outs=P("x"))
    # b's piece is 32/8 x 24 values = 384 bytes and moves 8 times (the last move brings it
    # home and is for nothing): 3072 bytes, all of them sent.
    assert table == {("collective-permute", ("x",)): (8, 3072, 3072)}


def test_experts_and_their_tokens():
    """Two layers on 2 data x 4 expert devices: tokens go to the experts and come back."""
    mesh = mesh_of(data=2, expert=4)

    def layer(x, w):  # 16 tokens of 8 features here, 4 for each expert
        sent = lax.all_to_all(x.reshape(4, 4, 8), "expert", 0, 0)
        done = jnp.tanh(jnp.einsum("ecd,df->ecf", sent, w[0]))
        return lax.all_to_all(done, "expert", 0, 0).reshape(16, 8), None

    def f(x, w):
        return lax.scan(layer, x, w)[0]

    tokens = P(("data", "expert"))
    table = moved(f, mesh, ((128, 8), tokens), ((2, 4, 8, 8), P(None, "expert")), outs=tokens)
    # Out and back, in 2 layers: 4 exchanges of 16 x 8 values = 512 bytes. Of each, one
    # quarter stays: 384 bytes leave, 1536 in all.
    assert table == {("all-to-all", ("expert",)): (4, 2048, 1536)}


def test_a_pipeline_of_four_stages():
    """6 microbatches through 4 stages take 9 ticks, with one hand-over each."""
    mesh = mesh_of(stage=4, data=2)

    def f(x, w):  # x: 6 microbatches of 2 rows here
        stage = lax.axis_index("stage")

        def tick(t, state):
            here, done = state
            new = lax.dynamic_index_in_dim(x, jnp.minimum(t, 5), keepdims=False)
            here = jnp.tanh(jnp.where(stage == 0, new, here) @ w[0])
            done = lax.dynamic_update_index_in_dim(done, here, jnp.maximum(t - 3, 0), 0)
            return lax.ppermute(here, "stage", [(0, 1), (1, 2), (2, 3)]), done

        varying = lambda v: lax.pcast(v, ("stage", "data"), to="varying")  # noqa: E731
        start = varying(jnp.zeros((2, 8))), varying(jnp.zeros((6, 2, 8)))
        _, done = lax.fori_loop(0, 9, tick, start)
        return lax.psum(jnp.where(stage == 3, done, 0), "stage")

    batches = P(None, "data")
    table = moved(f, mesh, ((6, 4, 8), batches), ((4, 8, 8), P("stage")), outs=batches)
    # A hand-over is 2 x 8 values = 64 bytes, 9 times: 576. The last stage's results, 6 x 2
    # x 8 values = 384 bytes, are then summed to every stage: 2 x 3/4 of it on a ring of 4.
    assert table == {
        ("collective-permute", ("stage",)): (9, 576, 576),
        ("all-reduce", ("stage",)): (1, 384, 576),
    }


def test_loops_inside_loops():
    """2 microsteps of 3 layers on 2 data x 4 model devices, split along the sequence."""
    mesh = mesh_of(data=2, model=4)

    def f(x, w):  # x: 2 microsteps of 3 sequences of 8/4 positions, 16 features
        def layer(h, w):
            whole = lax.all_gather(h, "model", axis=1, tiled=True)
            part = jnp.tanh(whole @ w)
            return lax.psum_scatter(part, "model", scatter_dimension=1, tiled=True), None

        def microstep(total, h):
            h, _ = lax.scan(layer, h, w)
            return total + lax.psum(jnp.sin(h).sum(), "data"), None

        start = lax.pcast(jnp.zeros(()), "model", to="varying")
        return lax.scan(microstep, start, x)[0][None]

    table = moved(
        f,
        mesh,
        ((2, 6, 8, 16), P(None, "data", "model")),
        ((3, 16, 16), P()),
        outs=P("model"),
    )
    # A layer gathers and scatters 3 x 8 x 16 values = 1536 bytes, 2 x 3 = 6 times: 9216.
    # A microstep sums one number over data: 2 x 4 bytes.
    assert table == {
        ("all-gather", ("model",)): (6, 9216, 6912),
        ("reduce-scatter", ("model",)): (6, 9216, 6912),
        ("all-reduce", ("data",)): (2, 8, 8),
    }


def test_gradients_summed_in_two_steps_on_three_axes():
    """Scatter inside a replica, sum between replicas, gather again; model stays out."""
    mesh = mesh_of(replica=2, data=2, model=2)

    def f(g):
        piece = lax.psum_scatter(g, "data", tiled=True)
        piece = lax.psum(jnp.tanh(piece), "replica")
        return lax.all_gather(piece, "data", tiled=True)

    everywhere = P(("replica", "data", "model"))
    table = moved(f, mesh, ((128, 8), everywhere), outs=P("model"), check_vma=False)
    # g is 16 x 8 values here = 512 bytes: scattered, then half of it summed, then whole
    # again. On rings of 2: 1/2 of 512, 2 x 1/2 of 256, 1/2 of 512.
    assert table == {
        ("reduce-scatter", ("data",)): (1, 512, 256),
        ("all-reduce", ("replica",)): (1, 256, 256),
        ("all-gather", ("data",)): (1, 512, 256),
    }


def test_sums_over_two_of_three_axes():
    """A sum over two axes at once, then one over all three."""
    mesh = mesh_of(a=2, b=2, c=2)

    def f(x):
        return lax.psum(jnp.tanh(lax.psum(x, ("a", "c"))).sum(), ("a", "b", "c"))

    table = moved(f, mesh, ((64,), P(("a", "b", "c"))), outs=P(), check_vma=False)
    # 8 values = 32 bytes among 4 devices: 2 x 3/4 x 32 = 48. One value among 8: 7.
    assert table == {
        ("all-reduce", ("a", "c")): (1, 32, 48),
        ("all-reduce", ("a", "b", "c")): (1, 4, 7),
    }


@pytest.mark.parametrize("n", [2, 4, 8])
def test_data_parallel_gradients_follow_the_closed_form(n):
    """2 P (n - 1)/n bytes on the wire for P bytes of parameters."""
    types = (AxisType.Auto,)
    mesh = jax.make_mesh((n,), ("data",), axis_types=types, devices=jax.devices()[:n])

    def step(w, b, x):
        def loss(w, b):
            return lax.pmean(((jnp.tanh(x @ w) + b) ** 2).mean(), "data")

        return jax.grad(loss, (0, 1))(w, b)

    table = moved(
        step, mesh, ((16, 8), P()), ((8,), P()), ((2 * n, 16), P("data")), outs=(P(), P())
    )
    parameters = 4 * (16 * 8 + 8)
    assert table.wire("all-reduce", "data") == 2 * parameters * (n - 1) / n
    assert set(table) == {("all-reduce", ("data",))}
