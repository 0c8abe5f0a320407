"""Bring your own weights: the page, and what examples/llama.py shares with it."""

import importlib
import json
import tempfile
from filecmp import cmp
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import compilations
from flax import nnx
from llama_in_numpy import LLAMA3, forward, layout, make, read_all

import meshscope as ms
from defined import definitions, shown
from fetched import fetched_by
from pages import BOOK, check_exercise, exercises_of

PAGE = "own-weights"
EXAMPLES = BOOK.parent / "examples"
P = jax.P
SHARED = (
    "Config", "frequencies", "rotate", "linear", "Block", "Llama", "NAMES", "by_path",
    "load_weight", "load", "merged",
)  # fmt: skip


def loaded(page, folder=None, mesh=None, rank=0, **changes):
    """A model from a directory, with the functions of the page."""
    config = page.read_config(folder or page.folder)
    for field, value in changes.items():
        object.__setattr__(config, field, value)
    return page.load(partial(page.read, folder or page.folder), config, mesh or page.mesh, rank)


def weights_of(model):
    return {
        "/".join(map(str, path)): weight
        for path, weight in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }


def numpy_logits(page, tensors, tokens):
    return forward(page.CONFIG | {"rope_scaling": None}, tensors, np.asarray(tokens))


def close(logits, expected):
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_the_page_shows_the_definitions_of_the_program():
    """The model, the table of names and the functions that load and merge are those of llama.py."""
    on_page = shown(PAGE)
    in_file = definitions((EXAMPLES / "llama.py").read_text("utf-8"))
    assert {name: on_page[name] for name in SHARED} == {name: in_file[name] for name in SHARED}


# ---- the files --------------------------------------------------------------------------------


def test_the_files_have_the_public_layout(page):
    """Names, shapes and bytes, read by another reader; every size is another one."""
    found = read_all(page.folder)
    assert {name: tensor.shape for name, tensor in found.items()} == layout(page.CONFIG)
    for name, tensor in page.tensors.items():
        np.testing.assert_array_equal(found[name], tensor)
    config = page.config
    sizes = [config.V, config.D, config.F, config.H * config.C, config.K * config.C]
    assert len(set(sizes)) == len(sizes)
    index = json.loads((page.folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == found.keys()
    for path in page.folder.glob("*.safetensors"):
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


# ---- loading ----------------------------------------------------------------------------------


def test_every_bit_arrives_on_two_meshes(page):
    """All layers of all weights, on FSDP × tensor and on FSDP alone."""
    for mesh in (page.mesh, page.fsdp):
        weights = weights_of(loaded(page, mesh=mesh))
        seen = set()
        for path, name, transposed in page.NAMES:
            weight = np.asarray(weights[path][...])
            for n in range(page.config.L if "{n}" in name else 1):
                tensor = weight[n] if "{n}" in name else weight
                expected = page.tensors[name.format(n=n)]
                np.testing.assert_array_equal(tensor.T if transposed else tensor, expected)
                seen.add(name.format(n=n))
        assert seen == page.tensors.keys()


def test_each_device_holds_an_eighth_of_the_matrices_and_all_norms(page):
    """A little more than one eighth, because the norms are whole on every device."""
    whole = sum(tensor.nbytes for tensor in page.tensors.values())
    norms = sum(tensor.nbytes for tensor in page.tensors.values() if tensor.ndim == 1)
    assert page.held.unique_bytes == whole
    assert page.held.bytes_per_device == (whole - norms) / 8 + norms < whole / 7


def test_a_matrix_is_sharded_in_the_file_as_in_the_model_but_transposed(page):
    """What Orbax is asked for: P("model", "data") for P("data", "model"), and no entry for L."""
    asked = {}

    def note(targets):
        asked.update(targets)
        return page.read(page.folder, targets)

    page.load(note, page.config, page.mesh)
    query = asked["model.layers.1.self_attn.q_proj.weight"]
    assert query.sharding.spec == P("model", "data") and query.shape == (128, 64)
    down = asked["model.layers.1.mlp.down_proj.weight"]
    assert down.sharding.spec == P("data", "model") and down.shape == (64, 96)
    assert len(asked) == len(page.tensors)


def test_the_figure_counts_runs_of_bytes(page):
    """q_proj on 2 × 4: 32 runs of 128 bytes for device 0; divided by model alone, one of 8,192."""
    for spec, runs, run in [(P("model", "data"), 32, 128), (P("model"), 1, 8192)]:
        places = jax.NamedSharding(page.mesh, spec).devices_indices_map((128, 64))
        rows, columns = places[jax.devices()[0]]
        count, width = len(range(128)[rows]), len(range(64)[columns])
        found = (1, 4 * count * width) if width == 64 else (count, 4 * width)
        assert found == (runs, run)


def test_the_logits_are_those_of_numpy(page):
    """In float32, within 1e-5 of the largest logit."""
    close(page.logits_BSV, numpy_logits(page, page.tensors, page.batch_of(0, page.mesh)))


@pytest.mark.parametrize("changes", [{"tie_word_embeddings": True}, {"rope_scaling": LLAMA3}])
def test_a_tied_head_and_scaled_rotations_agree_as_well(page, tmp_path, changes):
    config, tensors = make(tmp_path / "model", torch_dtype="float32", **changes)
    scaling = tuple(LLAMA3.values())[1:] if config["rope_scaling"] else None
    model = loaded(page, tmp_path / "model", scaling=scaling)
    tokens = np.random.default_rng(0).integers(256, size=(4, 16))
    with jax.set_mesh(page.mesh):
        close(page.logits_of(model, tokens), forward(config, tensors, tokens))


def test_bfloat16_differs_by_about_two_percent(page, tmp_path):
    """Of the largest logit, with weights and arithmetic in bfloat16."""
    config, tensors = make(tmp_path / "model", torch_dtype="bfloat16")
    tokens = np.random.default_rng(0).integers(256, size=(4, 16))
    with jax.set_mesh(page.mesh):
        logits = page.logits_of(loaded(page, tmp_path / "model"), tokens)
    expected = forward(config, tensors, tokens)
    off = np.abs(np.asarray(logits, "float32") - expected).max() / np.abs(expected).max()
    assert 1e-3 < off < 4e-2


def test_shapes_do_not_notice_a_forgotten_transpose_of_a_square_matrix(page, tmp_path):
    """With as many features in the heads as in D, o_proj loads either way; the logits differ."""
    config, tensors = make(tmp_path / "model", torch_dtype="float32", head_dim=8)
    names, tokens = page.NAMES, np.random.default_rng(0).integers(256, size=(4, 16))
    logits = []
    try:
        for wrong in (False, True):
            page.variables["NAMES"] = [
                (path, name, transposed and not (wrong and "o_proj" in name))
                for path, name, transposed in names
            ]
            with jax.set_mesh(page.mesh):
                logits.append(np.asarray(page.logits_of(loaded(page, tmp_path / "model"), tokens)))
    finally:
        page.variables["NAMES"] = names
    expected = forward(config, tensors, tokens)
    close(logits[0], expected)
    assert np.abs(logits[1] - expected).max() > 0.1 * np.abs(expected).max()


# ---- training ---------------------------------------------------------------------------------


def test_only_adapters_have_optimizer_state(page):
    """wrt=LoRAParam: two moments of each adapter; wrt=Param: of every weight, without an error."""
    adapters = ms.memory(nnx.state(page.model, nnx.LoRAParam)).unique_bytes
    everything = ms.memory(nnx.state(page.model, nnx.Param)).unique_bytes
    for wrt, held in [(nnx.LoRAParam, adapters), (nnx.Param, everything)]:
        with jax.set_mesh(page.mesh):
            state = ms.memory(page.make_optimizer(page.model, wrt)).unique_bytes
        assert 0 <= state - 2 * held <= 16  # counts of steps
    assert everything > 5 * adapters


def test_b_has_sixteen_times_the_rate_of_a(page):
    """The first step of Adam is as long as the rate."""
    model = loaded(page, rank=4)
    before = {path: np.asarray(weight[...]) for path, weight in weights_of(model).items()}
    with jax.set_mesh(page.mesh):
        optimizer = page.make_optimizer(model, nnx.LoRAParam)
        ones = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.LoRAParam))
        optimizer.update(model, ones)
    for path, weight in weights_of(model).items():
        moved = np.abs(np.asarray(weight[...]) - before[path]).mean()
        wanted = 32e-3 if "lora_b" in path else 2e-3 if "lora_a" in path else 0
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


def test_training_changes_adapters_and_nothing_else(page):
    """The pretrained weights are the same, bit for bit."""
    weights = weights_of(page.model)
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


# ---- back, and to another mesh ----------------------------------------------------------------


def test_the_merged_model_is_the_model_with_adapters(page):
    """Its files, loaded without adapters, give the logits of the trained model, as NumPy does."""
    tokens = page.batch_of(0, page.mesh)
    with jax.set_mesh(page.mesh):
        trained = page.logits_of(page.model, tokens)
        again = page.logits_of(loaded(page, page.out), tokens)
    largest = np.abs(trained).max()
    np.testing.assert_allclose(trained, again, rtol=0, atol=1e-4 * largest)
    expected = numpy_logits(page, read_all(page.out), tokens)
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


def test_written_without_training_the_files_are_identical(page):
    weights = {path: weight[...] for path, weight in weights_of(loaded(page)).items()}
    with tempfile.TemporaryDirectory() as folder:
        page.write_like(page.folder, Path(folder), weights)
        names = sorted(path.name for path in page.folder.iterdir())
        assert names == sorted(path.name for path in Path(folder).iterdir()) and len(names) == 4
        for name in names:
            assert cmp(Path(folder, name), page.folder / name, shallow=False), name


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


def test_device_put_fetches_an_array_whose_pieces_differ_and_send_does_not(page):
    """Onto the last four devices: device_put takes the whole weight through the host, send nothing."""
    weight = page.weights["blocks/query/kernel"]
    target = jax.NamedSharding(page.sampler, P(None, None, "model"))
    assert fetched_by(lambda: jax.device_put(weight, target)) == [weight.shape]
    assert fetched_by(lambda: page.send(weight, page.sampler)) == []


def test_the_sampler_has_the_same_weights_on_four_devices(page):
    """Each matrix is divided by four along `model`, and equal to that of the trainer."""
    assert page.sampler.devices.flatten().tolist() == jax.devices()[4:]
    for path, weight in page.weights.items():
        sent = page.sent[path]
        assert sent.sharding.device_set == set(jax.devices()[4:])
        parts = 1 if "norm" in path else 4
        assert sent.addressable_shards[0].data.size * parts == weight.size
        np.testing.assert_array_equal(sent, weight)


def test_the_sentence_that_is_quoted_is_what_the_program_says(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    llama = importlib.import_module("llama")
    make(tmp_path, architectures=["Qwen3ForCausalLM"])
    with pytest.raises(ValueError) as refused:
        llama.read_config(tmp_path)
    said = str(refused.value).replace(f"{tmp_path}/", "")
    assert f"*{said}*" in (BOOK / f"{PAGE}.md").read_text("utf-8")


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    """The check rejects the stub and a wrong answer, and accepts the solution."""
    check_exercise(page, PAGE, exercise)
