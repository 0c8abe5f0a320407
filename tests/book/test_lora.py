"""Fine-tune with LoRA: the page, and what examples/llama.py shares with it."""

import importlib
import sys
from filecmp import cmp

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import compilations
from flax import nnx
from llama_in_numpy import read_all

import meshscope as ms
from defined import definitions, shown
from pages import BOOK, check_exercise, exercises_of
from small_llama import loaded, numpy_logits, weights_of

PAGE = "lora"
EXAMPLES = BOOK.parent / "examples"


@jax.jit
def logits_of(model, tokens_BS):
    return model(tokens_BS)


def test_the_page_shows_the_functions_of_the_program():
    """What adds adapters, and what merges them, is that of llama.py."""
    on_page = shown(PAGE)
    in_file = definitions((EXAMPLES / "llama.py").read_text("utf-8"))
    for name in ("adapter_of", "add_adapters", "merged"):
        assert on_page[name] == in_file[name]


def test_adapters_are_sharded_like_the_sides_of_their_matrix(page):
    """A has the entry for the inputs of its matrix, B that for the outputs."""
    for name in ("query", "key", "value", "out", "gate", "up", "down"):
        layer = getattr(page.model.blocks, name)
        _, rows, columns = layer.base_module.kernel[...].sharding.spec
        a, b = (adapter[...].sharding.spec for adapter in (layer.lora_a, layer.lora_b))
        assert (*a, None, None)[1:3] == (rows, None) and (*b, None, None)[1:3] == (None, columns)


def test_only_adapters_have_optimizer_state(page):
    """wrt=LoRAParam: two moments of each adapter; wrt=Param: of every weight, without an error."""
    adapters = ms.memory(nnx.state(page.model, nnx.LoRAParam)).unique_bytes
    everything = ms.memory(nnx.state(page.model, nnx.Param)).unique_bytes
    for wrt, held in [(nnx.LoRAParam, adapters), (nnx.Param, everything)]:
        with jax.set_mesh(page.mesh):
            optimizer = nnx.Optimizer(page.model, optax.adamw(1e-2), wrt=wrt)
        state = ms.memory(optimizer).unique_bytes
        assert 0 <= state - 2 * held <= 16  # counts of steps
    assert f"{everything / adapters:.0f}" == "13"
    assert f"{(everything - adapters) / adapters:.0f}" == "12"  # the model without adapters


def test_nnx_param_in_both_places_is_no_error_and_in_the_optimizer_alone_it_is(page):
    """Optimizer and gradients of everything; then an optimizer of everything, for adapters' gradients."""
    with jax.set_mesh(page.mesh):
        optimizer = nnx.Optimizer(page.model, optax.adamw(1e-2), wrt=nnx.Param)

        def update(trained):
            def step(model, optimizer):
                optimizer.update(model, nnx.state(model, trained))
                return model, optimizer

            jax.eval_shape(step, page.model, optimizer)

        update(nnx.Param)
        with pytest.raises(ValueError):
            update(nnx.LoRAParam)


def test_in_the_program_b_has_sixteen_times_the_rate_of_a(page, monkeypatch):
    """Of examples/finetune.py as it is started; the first step of Adam is as long as the rate."""
    monkeypatch.syspath_prepend(EXAMPLES)
    finetune = importlib.import_module("finetune")
    monkeypatch.setattr(sys, "argv", ["finetune.py", "folder"])
    given = finetune.arguments()
    model = loaded(page, rank=4)
    before = {path: np.asarray(weight[...]) for path, weight in weights_of(model).items()}
    with jax.set_mesh(page.mesh):
        optimizer = finetune.make_optimizer(model, given.learning_rate, given.b_times)
        ones = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.LoRAParam))
        optimizer.update(model, ones)
    for path, weight in weights_of(model).items():
        moved = np.abs(np.asarray(weight[...]) - before[path]).mean()
        wanted = 32e-4 if "lora_b" in path else 2e-4 if "lora_a" in path else 0
        np.testing.assert_allclose(moved, wanted, rtol=0.05)


def test_a_tree_of_labels_fails_with_the_message_that_is_quoted(page):
    """Labels made with jax.tree.map on the state are inside of variables; the optimizer's are not."""
    state = nnx.state(page.model, nnx.LoRAParam)
    groups = {"A": optax.adamw(1e-3), "B": optax.adamw(1e-2)}
    by_tree = optax.partition(groups, jax.tree.map(lambda array: "A", state))
    with jax.set_mesh(page.mesh), pytest.raises(ValueError, match="different types"):
        optimizer = nnx.Optimizer(page.model, by_tree, wrt=nnx.LoRAParam)
        optimizer.update(page.model, state)


def test_both_strategies_have_the_same_losses_and_the_loss_falls(page):
    """FSDP × tensor and FSDP alone, in float32."""
    np.testing.assert_allclose(page.losses, page.fsdp_losses, rtol=2e-4)
    assert page.losses[-1] < page.losses[0] - 1 and len(page.losses) == 8


def test_the_second_strategy_is_fsdp_alone_by_the_same_specs(page):
    """Every weight and adapter is on the mesh of FSDP, with the spec that it has on the first."""
    fsdp = weights_of(page.fsdp_model)
    for path, weight in weights_of(page.model).items():
        copy = fsdp[path][...]
        assert copy.sharding.mesh == page.fsdp and dict(page.fsdp.shape) == {"data": 8, "model": 1}
        assert copy.sharding.is_equivalent_to(
            jax.NamedSharding(page.fsdp, weight[...].sharding.spec), weight.ndim
        )


def test_training_changes_adapters_and_nothing_else(page):
    """The pretrained weights are the same, bit for bit."""
    weights = {path.replace("/base_module", ""): w for path, w in weights_of(page.model).items()}
    for path, weight in weights_of(loaded(page)).items():
        np.testing.assert_array_equal(weight[...], weights[path][...], path)
    assert all(np.asarray(w[...]).any() for path, w in weights.items() if "lora_b" in path)


def test_adapters_change_nothing_before_training(page):
    """B is zero: the logits on the page, of a model with adapters, are those without."""
    assert not any(
        np.asarray(w[...]).any()
        for path, w in weights_of(loaded(page, rank=4)).items()
        if path.endswith("lora_b")
    )


def test_saved_adapters_arrive_on_another_mesh(page):
    """They are a twelfth of all bytes, and the same bit for bit on the mesh of FSDP alone."""
    assert 12 < page.everything / ms.memory(page.adapters).unique_bytes < 13
    trained = weights_of(page.model)
    for path, weight in weights_of(page.fsdp_model).items():
        np.testing.assert_array_equal(weight[...], trained[path][...], path)
        assert weight[...].sharding.mesh == page.fsdp


def test_the_merged_model_is_the_model_with_adapters(page):
    """Its files, loaded without adapters, give the logits of the trained model, as NumPy does."""
    tokens = page.batch_of(0, page.mesh)
    with jax.set_mesh(page.mesh):
        trained = logits_of(page.model, tokens)
        again = logits_of(loaded(page, page.out), tokens)
    largest = np.abs(trained).max()
    np.testing.assert_allclose(trained, again, rtol=0, atol=1e-4 * largest)
    expected = numpy_logits(read_all(page.out), tokens)
    np.testing.assert_allclose(trained, expected, rtol=0, atol=1e-4 * largest)


def test_what_is_written_has_the_same_names_and_untrained_tensors_are_the_same(page):
    """The same files, names, order, shapes and dtypes; norms, embedding and head bit for bit."""
    old, new = read_all(page.folder), read_all(page.out)
    assert list(old) == list(new)
    for name, tensor in new.items():
        assert (tensor.shape, tensor.dtype) == (old[name].shape, old[name].dtype)
        assert (tensor == old[name]).all() == ("_proj" not in name), name
    for path in page.folder.glob("*.json"):
        assert cmp(path, page.out / path.name, shallow=False)


def test_bfloat16_loses_updates_below_one_part_in_512():
    """And keeps those above one in 256."""
    weights = np.random.default_rng(0).standard_normal(10_000).astype(jnp.bfloat16)
    for share, kept in [(1 / 520, 0), (1 / 250, len(weights))]:
        updated = (weights.astype("float32") * (1 + share)).astype(jnp.bfloat16)
        assert (updated != weights).sum() == kept


def test_merging_moves_nothing_between_devices(page):
    """W, A and B are sharded alike, so the compiled sum of a matrix has no collective."""
    model = loaded(page, rank=4)
    with compilations() as compiled:
        page.merged(model)
    assert len(compiled) == 7
    assert not any(len(ms.collectives(program)) for program in compiled)


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    """The check rejects the stub and a wrong answer, and accepts the solution."""
    check_exercise(page, PAGE, exercise)
