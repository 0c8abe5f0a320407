"""Chapter 13, "Mixture of experts", and its program in examples/experts.py."""

import inspect
import math
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import meshscope as ms
from compared import assert_same
from defined import functions, shown
from many_devices import experts
from many_devices.compiled import stored_program
from many_devices.experts import dense_mixture, train
from pages import BOOK, cells_of, check_exercise, exercises_of

PAGE = "13-experts"
FILE = BOOK.parent / "examples" / "experts.py"
P = jax.P


def rows_of(moved, kind):
    return [row for row in moved if row.kind == kind]


def lengths_of(page):
    """How many routes each queue is meant for, (devices, experts)."""
    return np.array(
        [np.bincount(routes, minlength=8) for routes in np.reshape(page.experts_BR, (8, -1))]
    )


def forward(page, mesh, Q):
    """Output of the mixture, and dropped routes, for the page's tokens on this mesh."""
    axes = mesh.axis_names

    def layer(params, x_block_BD):
        y_block_BD, _, dropped = page.mixture(params, x_block_BD, Q, axes)
        return y_block_BD, jax.lax.psum(dropped, axes)

    specs = dict(in_specs=(page.specs, P(axes)), out_specs=(P(axes), P()))
    return jax.jit(jax.shard_map(layer, mesh=mesh, **specs))


# Four tokens and two experts


def test_the_router_sends_three_of_four_tokens_to_expert_0(page):
    """The larger of two features decides, by a softmax of the two."""
    scores = np.exp(np.array([[2, 0], [0, 1], [3, 1], [1, 0]]))
    probs = scores / scores.sum(-1, keepdims=True)
    four = page.after("four-tokens")
    np.testing.assert_allclose(four.probs_BE, probs, rtol=1e-5)
    assert four.expert_B.tolist() == [0, 1, 0, 0] == probs.argmax(-1).tolist()


# The mixture on one device


def test_the_dense_mixture_is_a_loop_over_tokens(page):
    """Each token: the two experts of the largest probability, added by gates that sum to one."""
    params = {name: np.array(array, "float64") for name, array in page.params.items()}
    x_BD = np.array(page.x_BD, "float64")
    y_BD, _, dropped = page.dense_mixture(page.params, page.x_BD)
    for token in range(0, 512, 37):
        scores = np.exp(x_BD[token] @ params["router_DE"])
        probs = scores / scores.sum()
        first, second = np.argsort(-probs)[:2]
        expected = 0
        for expert in (first, second):
            h = x_BD[token] @ params["up_EDF"][expert]
            out = (h / (1 + np.exp(-h))) @ params["down_EFD"][expert]
            expected += probs[expert] / (probs[first] + probs[second]) * out
        np.testing.assert_allclose(y_BD[token], expected, rtol=1e-4, atol=1e-5)
    assert dropped == 0 and np.allclose(page.gates_BR.sum(-1), 1)


def test_the_dense_program_wastes_three_quarters(page):
    """Every expert works on every token, and a token uses two of eight: 6/8 is wasted."""
    assert page.experts_BR.shape == (512, 2) and page.params["router_DE"].shape[1] == 8


def test_a_token_chooses_different_experts_so_64_slots_are_always_enough(page):
    """The experts of a token differ, so no queue of a device is longer than its 64 tokens."""
    assert np.all(page.experts_BR[:, 0] != page.experts_BR[:, 1])
    assert lengths_of(page).max() <= 64 == page.capacity(64, 8 / 2)


def test_the_untrained_router_is_unfair(page):
    """Experts are far from equally popular: one gets more than ten times what another gets."""
    popular = np.bincount(np.ravel(page.experts_BR), minlength=8)
    assert popular.sum() == 1_024 and popular.max() > 10 * popular.min()


def test_with_one_expert_a_scaled_gate_teaches_the_router_nothing(page):
    """For k = 1 the gate is 1 whatever the router says; the probability itself has a gradient."""

    def scaled(router_DE):
        return page.route(page.x_BD, router_DE, k=1)[1].sum()

    def unscaled(router_DE):
        return page.route(page.x_BD, router_DE, k=1)[0].max(-1).sum()

    router_DE = page.params["router_DE"]
    np.testing.assert_allclose(jax.grad(scaled)(router_DE), 0, atol=1e-4)
    assert jnp.linalg.norm(jax.grad(unscaled)(router_DE)) > 1


# Queues and slots


def test_a_slot_counts_earlier_routes_to_the_same_expert(page):
    """First come, first served, on random routes; and the example in view."""
    rng = np.random.default_rng(0)
    experts_BR = np.stack([rng.permutation(5)[:2] for _ in range(40)])
    flat = experts_BR.ravel()
    expected = [int(np.sum(flat[:n] == flat[n])) for n in range(len(flat))]
    assert np.array_equal(page.slots_of(jnp.array(experts_BR), 5).ravel(), expected)
    assert page.expert_B.tolist() == [0, 1, 0, 0]
    assert page.chosen.tolist() == [[1, 0], [0, 1], [1, 0], [1, 0]]
    assert page.earlier.tolist() == [[0, 0], [1, 0], [1, 1], [2, 1]]
    assert page.four_slots_BR.ravel().tolist() == [0, 0, 1, 2]


def test_with_two_slots_token_3_is_dropped_and_gets_zeros(page):
    """Queues: tokens 0 and 2, token 1 and an empty slot. Plain indexing: token 2's result."""
    assert page.two_queues_EQD.tolist() == [[[2, 0], [3, 1]], [[0, 1], [0, 0]]]
    results_EQD = 10 * page.two_queues_EQD
    where = page.four_experts_BR, page.four_slots_BR
    combined_BD = page.combine(results_EQD, page.ones_BR, *where)
    assert combined_BD.tolist() == [[20, 0], [0, 10], [30, 10], [0, 0]]
    assert results_EQD[where].tolist()[3] == [[30, 10]]


def test_the_exchange_brings_device_3_the_queues_for_expert_3(page):
    """What the page prints: 30 to 37 before, and 3, 13, ... 73 after."""
    arrived = page.exchange(page.numbers.reshape(64, 1))
    assert page.numbers[3].tolist() == list(range(30, 38))
    assert arrived[3].tolist() == list(range(3, 80, 10))


def test_the_first_exchange_brings_own_experts_the_tokens_of_all_devices(page):
    """From (all experts, own tokens) to (own experts, tokens of all devices), and back."""

    def exchange(queues_EQ):
        arrived = page.to_experts(queues_EQ)
        return arrived, page.from_experts(arrived)

    specs = dict(in_specs=P("expert"), out_specs=(P("expert"), P("expert")))
    sent = 100 * jnp.arange(8)[:, None, None] + 10 * jnp.arange(8)[:, None] + jnp.arange(3)
    arrived, back = jax.shard_map(exchange, mesh=page.mesh, **specs)(sent.reshape(64, 3))
    assert np.array_equal(arrived.reshape(8, 8, 3), np.swapaxes(sent, 0, 1))
    assert np.array_equal(back.reshape(8, 8, 3), sent)


def test_a_dropped_route_adds_nothing(page):
    """With 20 slots, each token gets the sum of its routes that had a slot, and no more."""
    y_BD, dropped = forward(page, page.mesh, 20)(page.params, page.x_BD)
    slots = [page.slots_of(rows, 8) for rows in jnp.reshape(page.experts_BR, (8, 64, 2))]
    kept_BR = np.reshape(slots, (512, 2)) < 20
    gates_BE = np.zeros((512, 8), "float32")
    np.put_along_axis(gates_BE, np.array(page.experts_BR), page.gates_BR * kept_BR, axis=1)
    x_EBD = jnp.broadcast_to(page.x_BD, (8, 512, 32))
    y_EBD = page.feed_forward(x_EBD, page.params["up_EDF"], page.params["down_EFD"])
    assert_same(y_BD, jnp.einsum("BE,EBD->BD", gates_BE, y_EBD))
    assert dropped == np.sum(~kept_BR) == 316
    assert np.any(~kept_BR.any(axis=1)), "some tokens lose both, and keep the residual alone"
    assert not np.any(y_BD[~kept_BR.any(axis=1)])


def test_a_token_without_results_passes_through_the_residual_connection(page):
    """If the layer returns zeros, the rest of the model is what it is without the layer."""
    pixels_BI, labels_B = page.batch

    def nothing(params, x_BD):
        return jnp.zeros_like(x_BD), 0.0, 0

    loss, _ = page.loss_of(page.params, page.batch, nothing)
    logits_BV = page.x_BD @ page.params["out_DV"]
    log_probs_BV = jax.nn.log_softmax(logits_BV)
    assert np.isclose(loss, -log_probs_BV[jnp.arange(512), labels_B].mean(), rtol=1e-5)


def test_plain_indexing_reads_the_last_slot(page):
    """Without mode="fill" a slot that does not exist is read as the last one."""
    y_EQ = jnp.arange(1, 7).reshape(2, 3)
    expert, slot = jnp.array([0, 1]), jnp.array([7, 1])
    assert np.array_equal(y_EQ[expert, slot], [3, 5])
    assert np.array_equal(y_EQ.at[expert, slot].get(mode="fill", fill_value=0), [0, 5])


# Equal to the dense program


def test_on_eight_devices_loss_and_gradients_are_those_of_one(page):
    """With 64 slots nothing is dropped; loss and every gradient agree with the dense program."""
    assert page.after("equal").dropped == 0
    assert_same(page.loss, page.dense_loss, rtol=1e-6)
    assert_same(page.gradient, page.dense_gradient)


def test_two_by_four_devices_give_the_same(page):
    """On the mesh of data and expert, the same program has the same loss and gradients."""
    assert page.dropped == 0
    assert_same(page.grid_loss, page.dense_loss, rtol=1e-6)
    assert_same(page.grid_gradient, page.dense_gradient)


def test_the_training_goes_down_the_gradient(page):
    """The loss after two steps is that of SGD, written out."""
    weights = page.params
    for _ in range(2):
        _, gradient = page.dense_program(weights, page.batch)
        weights = jax.tree.map(lambda w, g: w - 0.5 * g, weights, gradient)
    (loss, _), _ = page.dense_program(weights, page.batch)
    _, history = page.runs["dense"]
    assert np.isclose(history[2][0], loss, rtol=1e-5)


def test_a_device_stores_one_expert(page):
    """Experts' gradients and updated weights are sharded along E, one on each device."""
    weights, _ = page.runs["factor 1.25"]
    for tree in (page.gradient, weights):
        for name, shape in (("up_EDF", (1, 32, 64)), ("down_EFD", (1, 64, 32))):
            assert {s.data.shape for s in tree[name].addressable_shards} == {shape}
        assert tree["router_DE"].is_fully_replicated and tree["in_ID"].is_fully_replicated
    assert page.grid_gradient["up_EDF"].addressable_shards[0].data.shape == (2, 32, 64)


# Bytes


def test_four_all_to_alls_of_65_536_bytes(page):
    """Two forward and two backward, of E Q D numbers in float32; 7/8 of that is sent."""
    exchanges = rows_of(page.moved, "all-to-all")
    assert [row.payload_bytes for row in exchanges] == 4 * [8 * 64 * 32 * 4] == 4 * [65_536]
    assert [row.wire_bytes for row in exchanges] == 4 * [57_344] == page.sent
    assert {row.executions for row in page.moved} == {1}
    program = forward(page, page.mesh, 64).lower(page.params, page.x_BD).compile()
    assert len(rows_of(ms.collectives(program, page.mesh), "all-to-all")) == 2


def test_the_rest_is_the_gradients_of_replicated_weights(page):
    """All-reduces of in, router and out; no sum has the size of an expert. The rest is 32 bytes."""
    sums = rows_of(page.moved, "all-reduce")
    large = sorted(row.payload_bytes for row in sums if row.payload_bytes > 1000)
    replicated = ("router_DE", "out_DV", "in_ID")
    assert large == sorted(page.params[name].nbytes for name in replicated)
    assert max(row.payload_bytes for row in sums if row.payload_bytes <= 1000) == 32
    assert {row.kind for row in page.moved} == {"all-to-all", "all-reduce"}


def test_on_two_by_four_each_kind_has_its_axes(page):
    """All-to-alls along expert, 3/4 sent; experts summed along data; everything else along both."""
    compiled = page.grid_program.lower(page.params, page.batch).compile()
    moved = ms.collectives(compiled, page.grid)
    exchanges = rows_of(moved, "all-to-all")
    assert {row.axes for row in exchanges} == {("expert",)} and len(exchanges) == 4
    assert [row.wire_bytes for row in exchanges] == 4 * [49_152]
    assert {row.groups for row in exchanges} == {((0, 1, 2, 3), (4, 5, 6, 7))}
    sums = rows_of(moved, "all-reduce")
    along_data = [row.payload_bytes for row in sums if row.axes == ("data",)]
    assert along_data == 2 * [2 * 32 * 64 * 4]
    assert {row.axes for row in sums} == {("data",), ("data", "expert")}


@pytest.mark.parametrize("E", [8, 16, 32])
@pytest.mark.parametrize("factor", [1, 1.25, 4])
def test_queues_are_k_times_factor_times_the_activations(page, E, factor):
    """E Q D = k x factor x b D, however many experts there are, if nothing is rounded up."""
    assert E * page.capacity(128, factor, k=2, E=E) == 2 * factor * 128


def test_few_tokens_are_rounded_up(page):
    """4 tokens, k = 8, 256 experts, a factor of 1.25: 256 slots, and not 40."""
    assert 256 * page.capacity(4, 1.25, k=8, E=256) == 256 > 1.25 * 8 * 4 == 40


@pytest.mark.parametrize("page_program", ["experts-padded", "experts-grid"])
def test_other_compilers_keep_all_four_and_tpu_sends_two_in_bfloat16(page_program):
    """Four all-to-alls on TPU and GPU; in bytes they differ on TPU, where two are in bfloat16."""
    stored = stored_program(page_program)
    exchanges = {
        compiler: {
            row["dtype"]: (row["executions"], row["payload"])
            for row in stored[compiler]["moves"]
            if row["kind"] == "all-to-all"
        }
        for compiler in ("tpu", "gpu")
    }
    assert exchanges["gpu"] == {"float32": (4, 4 * 65_536)}
    assert exchanges["tpu"] == {"float32": (2, 2 * 65_536), "bfloat16": (2, 2 * 32_768)}


def test_the_bytes_do_not_depend_on_where_tokens_want_to_go(page):
    """With a router that sends all tokens to two experts, the program is the same."""
    program = forward(page, page.mesh, 20)
    one_way = page.params | {"router_DE": page.params["router_DE"].at[:, 2:].set(-100.0)}
    texts = [program.lower(params, page.x_BD).as_text() for params in (page.params, one_way)]
    assert texts[0] == texts[1]


# Dropped routes


@pytest.mark.parametrize(
    "factor, slots, lost", [(1, 16, 412), (1.25, 20, 316), (2, 32, 91), (4, 64, 0)]
)
def test_as_many_are_dropped_as_predicted(page, factor, slots, lost):
    """A queue of length l loses max(0, l - Q), and that is what the program counts."""
    Q = page.capacity(64, factor)
    _, dropped = forward(page, page.mesh, Q)(page.params, page.x_BD)
    assert (Q, np.maximum(lengths_of(page) - Q, 0).sum(), dropped) == (slots, lost, lost)


def test_at_a_factor_of_4_three_quarters_are_padding(page):
    """512 slots for 128 routes of a device; its expert multiplies 512 rows, as 1/8 of dense."""
    slots, routes, devices = 8 * 64, 64 * 2, 8
    assert routes / slots == 1 / 4 and lengths_of(page).sum(axis=1).max() == routes
    rows = []

    def counted(x_EQD, up_EDF, down_EFD):
        rows.append(x_EQD.shape[0] * x_EQD.shape[1])
        return x_EQD

    with mock.patch.dict(page.variables, feed_forward=counted):
        forward(page, page.mesh, 64).lower(page.params, page.x_BD)
    with mock.patch.object(experts, "feed_forward", counted):
        page.dense_mixture(page.params, page.x_BD)
    assert rows == [512, 8 * 512] and rows[0] == rows[1] // devices


def test_with_a_factor_of_1_25_the_loss_falls_and_a_quarter_is_dropped(page):
    """The loss falls at every step, ends higher than without drops, and 260 routes are dropped."""
    _, history = page.runs["factor 1.25"]
    losses, dropped = zip(*history, strict=True)
    assert dropped[0] == 316 and 0.3 < 316 / 1_024 < 1 / 3 and len(history) == 20
    assert round(dropped[-1] / 1_024, 2) == 0.25
    assert all(later < earlier for earlier, later in zip(losses, losses[1:], strict=False))
    _, dense = page.runs["dense"]
    assert losses[-1] > dense[-1][0] + 0.1


def test_with_drops_the_number_of_devices_changes_the_result(page):
    """Below E/k, eight and two by four devices give other outputs; at E/k the same."""
    grid = page.grid
    for Q, same in ((64, True), (20, False)):
        on_eight, _ = forward(page, page.mesh, Q)(page.params, page.x_BD)
        half = jax.make_mesh((4,), ("expert",), axis_types=page.auto, devices=grid.devices[0])
        on_four, _ = forward(page, half, 2 * Q)(page.params, page.x_BD)  # 128 tokens on each
        assert np.allclose(on_eight, on_four, rtol=1e-4, atol=1e-5) == same


def test_what_a_token_gets_depends_on_the_others_of_its_device(page):
    """With drops, replacing the earlier tokens of a device changes the result of its last one."""
    program = forward(page, page.mesh, 20)
    other_BD = page.x_BD.at[:63].set(page.x_BD[64:127])
    before, _ = program(page.params, page.x_BD)
    after, _ = program(page.params, page.x_BD.at[:63].set(0.0))
    also, _ = program(page.params, other_BD)
    changed = [not np.allclose(before[63], y_BD[63], atol=1e-6) for y_BD in (after, also)]
    assert any(changed)
    assert np.allclose(before[64:], after[64:], atol=1e-6)


# Gradients of the router


def test_the_routers_gradient_is_checked_on_eight_devices_too(page):
    """Where nothing is dropped, the router's gradient is not small, and it is the dense one."""
    assert jnp.linalg.norm(page.gradient["router_DE"]) > 1e-3
    assert_same(page.gradient["router_DE"], page.dense_gradient["router_DE"], atol=1e-7)


# Gradients averaged afterwards


def test_averaged_afterwards_replicated_weights_get_eight_times_and_experts_a_mixture(page):
    """Replicated: eight times. Experts: on every device the same, the sum of all experts'."""

    def average_afterwards(params, batch_block):
        layer = partial(page.mixture, Q=64, axes=("expert",))
        gradient, _ = jax.grad(partial(page.loss_of, layer=layer), has_aux=True)(
            params, batch_block
        )
        return jax.lax.pmean(gradient, "expert")

    specs = dict(in_specs=(page.specs, P("expert")), out_specs=page.specs)
    wrong = jax.shard_map(average_afterwards, mesh=page.mesh, **specs)
    found = jax.jit(wrong)(page.params, page.batch)
    for name in ("in_ID", "router_DE", "out_DV"):
        assert_same(found[name], 8 * page.dense_gradient[name], atol=1e-5)
    for name in ("up_EDF", "down_EFD"):
        pushed = np.array(found[name])
        assert_same(pushed, np.tile(pushed[:1], (8, 1, 1)))
        assert_same(pushed[0], page.dense_gradient[name].sum(axis=0), atol=1e-5)


# With FSDP, in Flax, and in the file


def test_experts_can_be_sharded_along_data_too(page):
    """Gathered along data right before feed_forward: same gradients, stored in eighths."""
    specs = page.specs | {"up_EDF": P("expert", "data"), "down_EFD": P("expert", "data")}

    def mean_loss(params, batch_block):
        whole = {
            name: jax.lax.all_gather(params[name], "data", axis=1, tiled=True)
            for name in ("up_EDF", "down_EFD")
        }
        axes = ("data", "expert")
        layer = partial(page.mixture, Q=64, axes=axes)
        loss, _ = page.loss_of(params | whole, batch_block, layer)
        return jax.lax.pmean(loss, axes)

    batch_spec = P(("data", "expert"))
    mapped = jax.jit(
        jax.shard_map(
            jax.grad(mean_loss), mesh=page.grid, in_specs=(specs, batch_spec), out_specs=specs
        )
    )
    gradient = mapped(page.params, page.batch)
    assert_same(gradient, page.dense_gradient)
    assert gradient["up_EDF"].addressable_shards[0].data.shape == (2, 16, 64)


def test_a_model_under_jit_calls_the_layer_in_shard_map(page):
    """The wrapped layer in a model under plain jit: the dense loss and gradients, experts sharded."""
    program = jax.jit(
        jax.value_and_grad(partial(page.loss_of, layer=page.sharded_mixture), has_aux=True)
    )
    (loss, dropped), gradient = program(page.params, page.batch)
    assert dropped == 0
    for found in (loss, page.jit_loss):
        assert_same(found, page.dense_loss, rtol=1e-6)
    assert_same(gradient, page.dense_gradient)
    for name in ("up_EDF", "down_EFD"):
        assert {s.data.shape[0] for s in gradient[name].addressable_shards} == {1}


def test_the_wrapped_layer_counts_drops_of_all_devices(page):
    """With 20 slots in place of 64 it counts all 316."""
    mixture = page.mixture

    def with_20_slots(params, x_block_BD, Q, axes):
        return mixture(params, x_block_BD, 20, axes)

    with mock.patch.dict(page.variables, mixture=with_20_slots):
        _, _, dropped = jax.jit(page.sharded_mixture)(page.params, page.x_BD)
    assert dropped == 316


def test_in_a_flax_model_experts_are_params_annotated_with_expert(page):
    """An nnx.Param with E first, annotated with "expert" there, in a model under plain jit: the dense gradients."""

    class Experts(nnx.Module):
        def __init__(self, params):
            self.router = nnx.Param(params["router_DE"])
            self.up, self.down = nnx.Param(params["up_EDF"]), nnx.Param(params["down_EFD"])
            self.router.set_metadata(out_sharding=P())
            for weight in (self.up, self.down):
                weight.set_metadata(out_sharding=("expert", None, None))

        def __call__(self, x_BSD):
            weights = {"router_DE": self.router, "up_EDF": self.up, "down_EFD": self.down}
            arrays = {name: weight[...] for name, weight in weights.items()}
            others = {name: page.params[name] for name in ("in_ID", "out_DV")}
            y_BD, _, _ = page.sharded_mixture(arrays | others, x_BSD.reshape(-1, x_BSD.shape[-1]))
            return y_BD.reshape(x_BSD.shape)

    def loss(model, x_BSD):
        return jnp.mean(model(x_BSD) ** 2)

    def dense_loss(params):
        return jnp.mean(page.dense_mixture(params, page.x_BD)[0] ** 2)

    model = Experts(page.params)
    specs = nnx.get_partition_spec(model)
    assert specs.up.get_value() == specs.down.get_value() == P("expert", None, None)
    model = jax.device_put(model, jax.tree.map(partial(jax.NamedSharding, page.mesh), specs))
    gradient = jax.jit(jax.grad(loss))(model, page.x_BD.reshape(64, 8, 32))
    expected = jax.jit(jax.grad(dense_loss))(page.params)
    for name, weight in (("router_DE", "router"), ("up_EDF", "up"), ("down_EFD", "down")):
        assert_same(getattr(gradient, weight)[...], expected[name])
    assert gradient.up[...].addressable_shards[0].data.shape == (1, 32, 64)


def test_the_file_has_the_functions_of_the_page():
    """Every function of examples/experts.py is on the page as it is, or the page imports it."""

    on_page = shown(PAGE, functions) | shown("13b-load-balance", functions)
    for imported in (dense_mixture, train):
        on_page |= functions(inspect.getsource(imported))
    in_file = functions(FILE.read_text("utf-8"))
    del in_file["main"]
    assert in_file.keys() >= {"route", "mixture", "dense_mixture", "program_on", "capacity"}
    assert in_file == {name: on_page[name] for name in in_file}


def test_the_price_of_a_large_layer(page):
    """4,096 tokens, width 7,168, k = 8, factor 1.25, bfloat16, 64 devices: 2.3 GB, 46 ms."""
    variables = dict(page.variables)
    (solution,) = [c.source for c in cells_of(PAGE) if "solution-price" in c.tags]
    exec(solution, variables)
    price = variables["answer_price"](4096, 8, 1.25, 7168, 2, 64)
    assert price == 4 * 63 / 64 * 1.25 * 8 * 4096 * 7168 * 2
    assert f"{price / 1e9:.1f} {price / 50e9 * 1e3:.0f}" == "2.3 46"


def test_the_smallest_factor_that_never_drops_is_E_over_k(page):
    """A factor of E/k gives as many slots as tokens; less gives fewer, with enough tokens."""
    for tokens, k, E in ((64, 2, 8), (64, 1, 8), (48, 4, 16)):
        assert page.capacity(tokens, E / k, k, E) == tokens
        assert page.capacity(tokens, 0.97 * E / k, k, E) < tokens
    assert page.capacity(64, 3.99) == 64 and page.capacity(6_400, 3.99) < 6_400
    assert page.capacity(64, 1.25) == 20 == math.ceil(1.25 * 2 * 64 / 8)
    assert page.capacity(85, 1.25) == 27


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
