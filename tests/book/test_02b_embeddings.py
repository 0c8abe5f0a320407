"""The page "Shard an embedding along V or along D?": what it says is true."""

import jax
import numpy as np
import pytest
from flax import nnx

from many_devices.compiled import stored_program
from many_devices.helpers import put, traffic
from pages import check_exercise, compiled_for_cpu, exercises_of, source_of
from printed import rows_of

PAGE = "02b-embeddings"
P = jax.P


CHOICES = {  # strategy, along: name of its stored programs, sizes of the mesh, spec
    ("tensor parallelism", "along V"): ("tp-v", (2, 4), "model", None),
    ("tensor parallelism", "along D"): ("tp-d", (2, 4), None, "model"),
    ("FSDP", "along V"): ("fsdp-v", (8, 1), "data", None),
    ("FSDP", "along D"): ("fsdp-d", (8, 1), None, "data"),
}


def embedding(*names):
    return nnx.Embed(512, 64, embedding_metadata={"out_sharding": names}, rngs=nnx.Rngs(0))


@compiled_for_cpu
@pytest.mark.parametrize("choice", CHOICES)
def test_what_an_embedding_sends_is_ring_arithmetic(page, choice):
    """CPU: sums and gathers of vectors of tokens, or a gather of the whole matrix, in MB."""
    V, D, tokens = 32_768, 1024, 8 * 512
    vectors, matrix = 4 * tokens * D / 1e6, 4 * V * D / 1e6
    group = vectors / 2  # of the tokens of one of two groups along data
    n, eight = 3 / 4, 7 / 8  # (n - 1) / n on rings of four and eight
    wanted = {
        ("tensor parallelism", "along V"): (2 * group * n, 0),
        ("tensor parallelism", "along D"): (group * n, matrix * n),
        ("FSDP", "along V"): (2 * vectors * eight, vectors * eight),
        ("FSDP", "along D"): (vectors / 8 * eight, matrix * eight),
    }
    _, sizes, *spec = CHOICES[choice]
    mesh, embed, ids_BT, x_BTD = page.abstract_inputs(sizes, *spec)
    with jax.set_mesh(mesh):
        found = [
            traffic(page.lookup, embed, ids_BT, mesh=mesh),
            traffic(page.tied_loss, embed, x_BTD, ids_BT, mesh=mesh),
        ]
    sent = [sum(row.wire_bytes for row in moves) / 1e6 for moves in found]
    np.testing.assert_allclose(sent, wanted[choice], atol=0.15)  # ids and a few sums


@compiled_for_cpu
def test_tensor_parallelism_gathers_vectors_at_the_start_and_the_matrix_at_the_end(page):
    """The page's own count, along D: 6.3 MB and 100.7 MB."""
    sent = [sum(row.wire_bytes for row in moves) / 1e6 for moves in (page.at_start, page.at_end)]
    assert [f"{megabytes:.1f}" for megabytes in sent] == ["6.3", "100.7"]


def megabytes(choice, compiler, end):
    """What a device sends in a stored program."""
    moves = stored_program(f"embed-{CHOICES[choice][0]}-{end}")[compiler]["moves"]
    return f"{sum(move['wire'] for move in moves) / 1e6:.1f}"


@pytest.mark.parametrize("strategy", ["tensor parallelism", "FSDP"])
def test_the_tables_are_what_the_compilers_made(strategy):
    """H100 and TPU v5e: the megabytes of the eight stored programs; lookups send the same on both."""
    table = rows_of(source_of(PAGE).read_text("utf-8"), strategy)
    assert list(table) == [along for of, along in CHOICES if of == strategy]
    for along, row in table.items():
        choice = strategy, along
        assert row["lookup"] == megabytes(choice, "gpu", "lookup")
        assert row["lookup"] == megabytes(choice, "tpu", "lookup")
        assert row["tied loss, H100"] == megabytes(choice, "gpu", "tied-loss")
        assert row["tied loss, TPU v5e"] == megabytes(choice, "tpu", "tied-loss")


@pytest.mark.parametrize("choice", ["tp-d", "fsdp-d"])
def test_along_d_a_tied_loss_gathers_the_matrix_on_tpu_in_bfloat16(choice):
    """Both compilers gather the whole matrix, the TPU's in bfloat16 and H100's in float32."""
    for compiler, dtype in [("tpu", "bfloat16"), ("gpu", "float32")]:
        moves = stored_program(f"embed-{choice}-tied-loss")[compiler]["moves"]
        largest = max(moves, key=lambda move: move["wire"])
        assert (largest["kind"], largest["dtype"]) == ("all-gather", dtype)


@compiled_for_cpu
def test_along_v_a_lookup_adds_up_vectors_and_along_d_it_gathers_them(page):
    """Along V an all-reduce along model, along D an all-gather, of one device's tokens."""
    for names, kind in [(("model", None), "all-reduce"), ((None, "model"), "all-gather")]:
        with jax.set_mesh(page.mesh):
            embed = embedding(*names)
            ids_BT = put(np.zeros((8, 4), "int32"), page.mesh, "data")
            moves = traffic(page.lookup, embed, ids_BT, mesh=page.mesh)
        assert [(move.kind, move.axes, move.shape) for move in moves] == [
            (kind, ("model",), (4, 4, 64))
        ]


def test_the_loss_is_that_of_whole_logits(page):
    """tied_loss on the page.mesh, in either form, is the cross-entropy that NumPy computes."""
    rng = np.random.default_rng(0)
    x_BTD = rng.normal(size=(8, 4, 64)).astype("float32")
    labels_BT = rng.integers(0, 512, (8, 4))
    losses = []
    for names in [("model", None), (None, "model")]:
        with jax.set_mesh(page.mesh):
            embed = embedding(*names)
            losses.append(page.tied_loss(embed, put(x_BTD, page.mesh, "data"), labels_BT))
    logits = x_BTD @ np.asarray(embed.embedding).T
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = -np.take_along_axis(log_p, labels_BT[..., None], -1).mean()
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)


@compiled_for_cpu
def test_with_as_many_tokens_as_words_v_gathers_the_matrix_twice(page):
    """FSDP, compiled for CPU: along V both ends gather the matrix, and along D the loss alone."""
    V, D = 32_768, 1024
    for tokens in (V, 2 * V):
        for spec, wanted in [(("data", None), [V, V]), ((None, "data"), [tokens / 8, V])]:
            mesh, embed, ids_BT, x_BTD = page.abstract_inputs((8, 1), *spec)
            shape = tokens // 512, 512
            many_BT = jax.ShapeDtypeStruct(shape, "int32", sharding=ids_BT.sharding)
            many_BTD = jax.ShapeDtypeStruct((*shape, D), "float32", sharding=x_BTD.sharding)
            with jax.set_mesh(mesh):
                found = [
                    traffic(page.lookup, embed, many_BT, mesh=mesh),
                    traffic(page.tied_loss, embed, many_BTD, many_BT, mesh=mesh),
                ]
            sent = [sum(row.wire_bytes for row in moves) for moves in found]
            vectors = np.array(sent) / (4 * D * 7 / 8)
            np.testing.assert_allclose(vectors, wanted, rtol=0.01)


def test_on_h100_v_and_d_cost_the_same_at_17_500_tokens():
    """FSDP: 2 T vectors along V; the matrix and T / 8 vectors along D: equal at V / 1.875 tokens."""
    V = 32_768
    equal = V / (2 - 1 / 8)
    assert round(equal, -2) == 17_500 and 0.5 < equal / V < 0.55


@compiled_for_cpu
@pytest.mark.parametrize(
    "strategy, rows, less",
    [
        ("FSDP", 8, "along V"),
        ("FSDP", 64, "along D"),
        ("tensor parallelism", 8, "along V"),
    ],
)
def test_the_gradients_rank_the_same(page, strategy, rows, less):
    """Compiled for CPU: the gradient of a tied model, from ids to loss, at 4,096 and 32,768 tokens."""

    def both_ends(embed, ids_BT):
        return page.tied_loss(embed, jax.numpy.tanh(page.lookup(embed, ids_BT)), ids_BT)

    sent = {}
    for along in ("along V", "along D"):
        _, sizes, *spec = CHOICES[strategy, along]
        mesh, embed, ids_BT, _ = page.abstract_inputs(sizes, *spec)
        ids_BT = jax.ShapeDtypeStruct((rows, 512), "int32", sharding=ids_BT.sharding)

        def gradient(embed, ids_BT):
            grads = nnx.grad(both_ends)(embed, ids_BT)
            keep = lambda g: jax.lax.with_sharding_constraint(g, P(*spec))  # noqa: E731, B023
            return jax.tree.map(keep, grads)

        with jax.set_mesh(mesh):
            moves = traffic(gradient, embed, ids_BT, mesh=mesh)
        sent[along] = sum(row.wire_bytes for row in moves)
    assert min(sent, key=sent.get) == less


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    """The stub and a wrong answer get "not yet", the solution "correct"."""
    check_exercise(page, PAGE, exercise)
