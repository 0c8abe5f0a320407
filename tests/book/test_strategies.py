"""The page "Why many devices, and which strategy": bytes per weight, what is divided, what is sent."""

import ast

import jax
import jax.numpy as jnp
import jupytext
import optax
import pytest

import meshscope as ms
from pages import BOOK, compiled_for_cpu, run

PAGE = "strategies"
P = jax.P
AUTO = jax.sharding.AxisType.Auto


# Sixteen bytes are Adam's


def bytes_per_weight(tx):
    """Bytes of training for each weight: bfloat16 weight and gradient, a float32 master, the state."""
    master = jnp.zeros((1024, 1024), "float32")
    weight = gradient = master.astype("bfloat16")
    kept = [weight, gradient + 0, master, tx.init(master)]
    return ms.memory(kept).bytes_per_device / master.size


@pytest.mark.parametrize(
    "tx, expected",
    [
        (optax.adam(1e-3), 16),
        (optax.sgd(1e-3, momentum=0.9), 12),
        (optax.adam(1e-3, mu_dtype="bfloat16"), 14),
    ],
    ids=["adam", "momentum", "adam, first moment in bfloat16"],
)
def test_training_keeps_sixteen_bytes_a_weight_with_adam_and_less_with_others(tx, expected):
    """With Adam training keeps 16 bytes a weight, with momentum 12, with a moment in bfloat16 14."""
    assert bytes_per_weight(tx) == pytest.approx(expected, abs=0.01)


# What data parallelism divides


@pytest.fixture(scope="module")
def divided():
    """The page as far as the cell that divides, where n is 8; below it n is rebound."""
    with run(PAGE, until="per-device") as page:
        yield page


def test_data_parallelism_divides_the_activations_and_not_the_state(divided):
    """Of eight sequences each device takes one, so its activations are an eighth; the state is whole."""
    page, model, tokens = divided, divided.llama_8b, 8 * 4096
    by = page.strategies["data parallel"]
    whole = page.layer_inputs(model, tokens) + page.logits(model, tokens)
    assert sum(page.activations_per_device(model, by, tokens)) == whole / 8
    assert page.state_per_device(model, by) == sum(page.STATE.values()) * page.count(model)


def test_each_device_needs_as_much_as_one_device_for_one_sequence(divided):
    """With data parallelism each device needs 133.8 GB, as one device alone for one sequence."""
    page, model, by = divided, divided.llama_8b, divided.strategies["data parallel"]
    one = (
        page.state_per_device(model, by) + page.layer_inputs(model, 4096) + page.logits(model, 4096)
    )
    each = page.state_per_device(model, by) + sum(page.activations_per_device(model, by, 8 * 4096))
    assert one == each and f"{each / 1e9:.1f}" == "133.8"


def test_the_other_four_strategies_divide_the_state_as_well(divided):
    """The other four strategies divide the state as well."""
    page = divided
    whole = page.state_per_device(page.llama_8b, page.strategies["data parallel"])
    others = [by for name, by in page.strategies.items() if name != "data parallel"]
    assert len(others) == 4
    assert all(page.state_per_device(page.llama_8b, by) < whole for by in others)


# FSDP sends 6N if it drops what it gathered, and 4N if it keeps it

LAYERS, WIDTH = 8, 64


def fsdp_by_hand(around_a_layer):
    """Loss and gradients of FSDP over eight devices, one gather in each layer of a scan, compiled."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AUTO,))

    def layer(x_BD, w_piece_DD):
        w_DD = jax.lax.all_gather(w_piece_DD, "data", axis=0, tiled=True)
        return x_BD + jnp.tanh(x_BD @ w_DD), None

    def loss(w_LDD, x_BD):
        x_BD, _ = jax.lax.scan(around_a_layer(layer), x_BD, w_LDD)
        return jax.lax.pmean((x_BD**2).mean(), "data")

    pieces = P(None, "data")
    both = jax.shard_map(
        jax.value_and_grad(loss), mesh=mesh, in_specs=(pieces, P("data")), out_specs=(P(), pieces)
    )
    weights = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), "float32")
    batch = jax.ShapeDtypeStruct((8, WIDTH), "float32")
    return jax.jit(both).lower(weights, batch).compile()


def in_gathers(program):
    """What a device sends, in gathers of all weights, and the gathers alone."""
    one = 7 / 8 * 4 * LAYERS * WIDTH**2
    totals = ms.collectives(program).by("kind")
    weights = {kind: total.wire_bytes for kind, total in totals.items() if kind != "all-reduce"}
    return sum(weights.values()) / one, weights["all-gather"] / one


@compiled_for_cpu
def test_fsdp_that_drops_gathered_weights_sends_three_gathers(page):
    """Weights gathered in both passes and gradients scattered: three gathers of all weights, 6N."""
    assert in_gathers(fsdp_by_hand(jax.checkpoint)) == (3, 2)


@compiled_for_cpu
def test_fsdp_that_keeps_gathered_weights_sends_two_and_holds_them_all(page):
    """Kept for the backward pass, weights are gathered once, 4N, and a device holds all of them."""
    kept, dropped = fsdp_by_hand(lambda layer: layer), fsdp_by_hand(jax.checkpoint)
    assert in_gathers(kept) == (2, 1)
    more = ms.memory(kept).temporaries - ms.memory(dropped).temporaries
    all_weights = 4 * LAYERS * WIDTH**2
    assert more > 0.7 * all_weights  # all of them, in place of one or two at a time


# Meshes say their axis types


def test_every_mesh_of_the_page_says_its_axis_types(page):
    """Each mesh of the page says axis_types, because defaults differ: AbstractMesh is Explicit since
    JAX 0.11.1, and was Auto before."""
    assert page.mesh64.axis_types == (AUTO,)
    cells = jupytext.read(BOOK / f"{PAGE}.md").cells
    calls = [
        call
        for cell in cells
        if cell.cell_type == "code"
        for call in ast.walk(ast.parse(cell.source))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("AbstractMesh", "make_mesh", "Mesh")
    ]
    assert calls
    for call in calls:
        assert "axis_types" in {keyword.arg for keyword in call.keywords}, ast.unparse(call)


def test_the_default_of_an_abstract_mesh_depends_on_the_release():
    """Without axis_types an AbstractMesh is Explicit since JAX 0.11.1, and was Auto before."""
    explicit = jax.__version_info__ >= (0, 11, 1)
    expected = jax.sharding.AxisType.Explicit if explicit else AUTO
    assert jax.sharding.AbstractMesh((8,), ("data",)).axis_types == (expected,)


# The largest layer


def test_the_largest_layer_is_whole_beside_the_rest(page):
    """Of both models the largest layer is the embedding; whole, with its gradient, it has 2 + 2 bytes
    for each of its weights, 2.1 GB for the 8B model."""
    for model in (page.llama_1b, page.llama_8b):
        assert page.largest_layer(model) == 4 * model.V * model.D
    assert f"{page.largest_layer(page.llama_8b) / 1e9:.1f}" == "2.1"
