"""Bring your own weights: the page, and what examples/llama.py shares with it."""

import json
import tempfile
from filecmp import cmp
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from flax import nnx
from llama_in_numpy import LLAMA3, forward, layout, make, read_all

import meshscope as ms
from defined import definitions, shown
from many_devices.llama import CONFIG
from pages import BOOK, check_exercise, compiled_for_cpu, exercises_of
from small_llama import loaded, numpy_logits, weights_of

PAGE = "own-weights"
EXAMPLES = BOOK.parent / "examples"
P = jax.P
SHARED = (
    "linear", "norm", "Block", "Llama", "LAYER", "NAMES", "by_path", "read_tensor",
    "read_stack", "load",
)  # fmt: skip


def close(logits, expected):
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_the_page_shows_the_definitions_of_the_program():
    """The model, the table of names and the functions that load are those of llama.py."""
    on_page = shown(PAGE)
    in_file = definitions((EXAMPLES / "llama.py").read_text("utf-8"))
    assert {name: on_page[name] for name in SHARED} == {name: in_file[name] for name in SHARED}


# ---- the files --------------------------------------------------------------------------------


def test_the_files_have_the_public_layout(page):
    """Names, shapes and bytes, read by another reader; every size is another one."""
    found = read_all(page.folder)
    assert {name: tensor.shape for name, tensor in found.items()} == layout(CONFIG)
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
    fsdp = jax.make_mesh((8, 1), ("data", "model"), axis_types=page.auto)
    for mesh in (page.mesh, fsdp):
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
    """A little more than one eighth, because the norms are replicated."""
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


def test_each_device_along_model_has_one_key_value_head(page):
    """The columns of a shard of the keys' matrix are those of one head."""
    key = page.model.blocks.key.kernel[...]
    assert page.config.K == page.mesh.shape["model"] == 4
    assert key.addressable_shards[0].data.shape[2] == page.config.C


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
    close(page.logits_BSV, numpy_logits(page.tensors, page.tokens_BS))


def test_the_logits_are_sharded_by_the_batch_and_the_vocabulary(page):
    sharding = jax.NamedSharding(page.mesh, P("data", None, "model"))
    assert page.logits_BSV.sharding.is_equivalent_to(sharding, 3)


def test_the_reference_of_the_page_is_right(page):
    """It equals the other forward pass in NumPy, which is in float64; its error is that of float32."""
    close(page.expected_BSV, numpy_logits(page.tensors, page.tokens_BS))
    doubled = {name: tensor.astype("float64") for name, tensor in page.tensors.items()}
    tokens = page.tokens_BS[:2]
    found = page.logits_in_numpy(doubled, tokens, page.config)
    np.testing.assert_allclose(found, numpy_logits(page.tensors, tokens), rtol=0, atol=1e-11)
    assert page.error < 1e-5


def test_a_tied_head_agrees_as_well(page, tmp_path):
    """Without lm_head.weight, the logits come from the embedding."""
    config, tensors = make(tmp_path / "model", torch_dtype="float32", tie_word_embeddings=True)
    model = loaded(page, tmp_path / "model")
    tokens = np.random.default_rng(0).integers(256, size=(4, 16))
    with jax.set_mesh(page.mesh):
        close(page.logits_of(model, tokens), forward(config, tensors, tokens))


def sent_for_a_gradient(page, mesh):
    """Bytes that each device sends for one gradient of all weights, by the compiler for CPU."""
    graphdef, weights = nnx.get_abstract_model(lambda: page.Llama(page.config, nnx.Rngs(0)), mesh)
    by_rows = jax.NamedSharding(mesh, P("data"))
    tokens_BS = jax.ShapeDtypeStruct((16, 32), "int32", sharding=by_rows)

    def loss(weights, tokens_BS):
        return (nnx.merge(graphdef, weights)(tokens_BS) ** 2).mean()

    places = jax.tree.map(lambda weight: weight.sharding, weights)
    with jax.set_mesh(mesh):
        program = jax.jit(jax.grad(loss), out_shardings=places).lower(weights, tokens_BS).compile()
    return sum(move.executions * move.wire_bytes for move in ms.collectives(program, mesh))


@compiled_for_cpu
def test_compiled_for_cpu_without_constraints_fsdp_sends_four_times_as_much(page):
    """Without the two calls of with_sharding_constraint, FSDP becomes tensor parallelism."""
    fsdp = jax.make_mesh((8, 1), ("data", "model"), axis_types=page.auto)
    constrained = sent_for_a_gradient(page, fsdp)
    with mock.patch.object(jax.lax, "with_sharding_constraint", lambda x, sharding: x):
        assert sent_for_a_gradient(page, fsdp) > 4 * constrained


def test_scaled_rotations_raise_an_error_instead_of_wrong_angles(page):
    """read_config stops at rope_scaling, which it does not read."""
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), torch_dtype="float32", rope_scaling=LLAMA3)
        with pytest.raises(ValueError, match=r"scaled rotations: use read_config of .*llama\.py"):
            page.read_config(Path(folder))


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
    """With as many features in the heads as in D, o_proj loads either way; the logits differ.

    Written back with the wrong table, the files are identical all the same.
    """
    config, tensors = make(tmp_path / "model", torch_dtype="float32", head_dim=8)
    names, tokens = page.NAMES, np.random.default_rng(0).integers(256, size=(4, 16))
    logits = []
    try:
        for wrong in (False, True):
            page.variables["NAMES"] = [
                (path, name, transposed and not (wrong and "o_proj" in name))
                for path, name, transposed in names
            ]
            model, out = loaded(page, tmp_path / "model"), tmp_path / f"out-{wrong}"
            with jax.set_mesh(page.mesh):
                logits.append(np.asarray(page.logits_of(model, tokens)))
            out.mkdir()
            weights = {path: weight[...] for path, weight in weights_of(model).items()}
            page.write_like(tmp_path / "model", out, weights, page.variables["NAMES"])
            for path in out.iterdir():
                assert cmp(path, tmp_path / "model" / path.name, shallow=False)
    finally:
        page.variables["NAMES"] = names
    expected = forward(config, tensors, tokens)
    close(logits[0], expected)
    assert np.abs(logits[1] - expected).max() > 0.1 * np.abs(expected).max()


# ---- back -------------------------------------------------------------------------------------


def test_written_without_training_the_files_are_identical(page):
    weights = {path: weight[...] for path, weight in weights_of(loaded(page)).items()}
    with tempfile.TemporaryDirectory() as folder:
        page.write_like(page.folder, Path(folder), weights, page.NAMES)
        names = sorted(path.name for path in page.folder.iterdir())
        assert names == sorted(path.name for path in Path(folder).iterdir()) and len(names) == 4
        for name in names:
            assert cmp(Path(folder, name), page.folder / name, shallow=False), name


def test_the_page_says_that_all_files_are_unchanged(page):
    """The directory that the page wrote has the same files, byte for byte."""
    names = sorted(path.name for path in page.folder.iterdir())
    assert names == sorted(path.name for path in page.out.iterdir()) and len(names) == 4
    assert all(cmp(page.out / name, page.folder / name, shallow=False) for name in names)


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    """The check rejects the stub and a wrong answer, and accepts the solution."""
    check_exercise(page, PAGE, exercise)
