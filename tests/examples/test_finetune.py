"""examples/finetune.py, llama.py and safetensors_io.py: from files to a sharded model, and back."""

import json
import pickle
import subprocess
import sys
from filecmp import cmp
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import compilations
from flax import nnx
from llama_in_numpy import LLAMA3, SMALL, forward, layout, make, read_all

import finetune
import meshscope as ms
from llama import add_adapters, by_path, check_names, load, merged, read_config
from safetensors_io import BadWeights, open_directory, read, write_file, write_like

ROOT = finetune.Path(__file__).parents[2]
PROGRAM = ROOT / "examples" / "finetune.py"
TOKENS = np.random.default_rng(1).integers(256, size=(4, 12))
pytestmark = pytest.mark.usefixtures("compiled_once")


def mesh_of(data, model):
    auto = (jax.sharding.AxisType.Auto,) * 2
    devices = jax.devices()[: data * model]
    return jax.make_mesh((data, model), ("data", "model"), axis_types=auto, devices=devices)


def loaded(folder, mesh, rank=0, with_orbax=None):
    reader = partial(read, open_directory(folder), with_orbax=with_orbax)
    model = load(reader, read_config(folder), mesh)
    if rank:
        with jax.set_mesh(mesh):
            add_adapters(model, rank)
    return model


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def same(one, two):
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        other = two[name]
        assert (tensor.shape, tensor.dtype) == (other.shape, other.dtype), name
        np.testing.assert_array_equal(bits(tensor), bits(other), name)


def back(model, folder):
    """The model's tensors, under the names of the files."""
    entries, config = open_directory(folder), read_config(folder)
    weights = {path: w[...] for path, w in by_path(nnx.state(model, nnx.Param)).items()}
    tensor_of = finetune.tensors_of(weights, config, entries)
    return {name: tensor_of(name) for name in entries}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small") / "model"
    make(folder)
    return folder


# ---- loading ----------------------------------------------------------------------------------


@pytest.mark.parametrize("with_orbax", [True, False])
@pytest.mark.parametrize("sizes", [(2, 4), (8, 1), (1, 2)])
def test_every_bit_arrives_on_any_mesh_by_either_reader(small, sizes, with_orbax):
    """FSDP × tensor, FSDP alone, and tensor parallelism on two devices."""
    model = loaded(small, mesh_of(*sizes), with_orbax=with_orbax)
    same(back(model, small), read_all(small))
    for path, weight in by_path(nnx.state(model, nnx.Param)).items():
        piece = np.prod(weight.sharding.shard_shape(weight.shape))
        whole = "norm" in path
        assert piece * (1 if whole else sizes[0] * sizes[1]) == weight.size, path


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"rope_scaling": LLAMA3}],
    ids=["plain", "tied", "llama3"],
)
def test_the_logits_are_those_of_numpy(tmp_path, changes):
    """In float32, on a 2 × 4 mesh: within a hundred thousandth of the largest logit."""
    config, tensors = make(tmp_path / "model", torch_dtype="float32", **changes)
    mesh = mesh_of(2, 4)
    model = loaded(tmp_path / "model", mesh)
    with jax.set_mesh(mesh):
        logits = jax.jit(lambda model, tokens: model(tokens))(model, TOKENS)
    expected = forward(config, tensors, TOKENS)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_the_newer_form_of_a_configuration_says_the_same(tmp_path):
    """Transformers 5 has rope_parameters and dtype for rope_theta, rope_scaling and torch_dtype."""
    make(tmp_path / "old", rope_scaling=LLAMA3, rope_theta=5e5)
    config = SMALL | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}, "dtype": "bfloat16"}
    for key in ("rope_theta", "rope_scaling", "torch_dtype"):
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path) == read_config(tmp_path / "old")
    assert read_config(tmp_path).theta == 5e5 and read_config(tmp_path).scaling[0] == 32


# The configurations that are published beside the weights, and how many weights are in the files.
PUBLISHED = {
    "Llama-3.1-8B": ((128256, 4096, 14336, 32, 32, 8, False), 8_030_261_248),
    "Llama-3.2-1B": ((128256, 2048, 8192, 16, 32, 8, True), 1_235_814_400),
    "TinyLlama-1.1B": ((32000, 2048, 5632, 22, 32, 4, False), 1_100_048_384),
    "SmolLM2-135M": ((49152, 576, 1536, 30, 9, 3, True), 134_515_008),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_this_layout(tmp_path, name):
    """As many weights as published, with the names and shapes of the public layout."""
    *sizes, tied = PUBLISHED[name][0]
    keys = [key for key in SMALL if key.startswith(("vocab", "hidden_size", "inter", "num_"))]
    config = SMALL | dict(zip(keys, sizes)) | {"tie_word_embeddings": tied}
    del config["head_dim"]  # then it is hidden_size / num_attention_heads
    (tmp_path / "config.json").write_text(json.dumps(config))
    wanted = {}

    def note(targets):
        wanted.update({name: target.shape for name, target in targets.items()})
        return targets

    ours = read_config(tmp_path)
    with pytest.MonkeyPatch.context() as patched:  # shapes alone: nothing is allocated
        patched.setattr("llama.jax.jit", lambda function, **_: partial(jax.eval_shape, function))
        load(note, ours, mesh_of(1, 1))
    assert wanted == layout(config)
    assert sum(np.prod(shape) for shape in wanted.values()) == PUBLISHED[name][1]
    check_names(wanted, ours)


@pytest.mark.slow
def test_only_one_tensor_is_held_beside_the_model(tmp_path, run):
    """Measured: peak memory above the model's bytes stays under that of one stacked weight."""
    make(
        tmp_path / "model", files=3, torch_dtype="float32", hidden_size=512, num_hidden_layers=12,
        intermediate_size=4096, num_attention_heads=16, head_dim=32, num_key_value_heads=4,
    )  # fmt: skip
    code = f"""
import ctypes, gc, pathlib, re
import jax
from filecmp import cmp
from functools import partial
from flax import nnx
from llama import load, read_config
from safetensors_io import open_directory, read

def resident(kind):
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    said = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(kind + r":\\s+(\\d+)", said)[1])

folder = pathlib.Path({str(tmp_path / "model")!r})
auto = (jax.sharding.AxisType.Auto,) * 2
mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=auto)
reader = partial(read, open_directory(folder))
for _ in range(2):  # the first time, programs are compiled
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    arrays = jax.tree.leaves(nnx.state(load(reader, read_config(folder), mesh)))
    jax.block_until_ready(arrays)
    above = resident("VmHWM") - before - sum(array.nbytes for array in arrays)
    largest = max(array.nbytes for array in arrays)
    del arrays
print(above, largest, largest // 12)
"""
    above, largest, tensor = map(int, run(8, code).split())
    assert tensor == 4 * 512 * 4096 and above < 0.9 * largest


def test_two_processes_read_only_what_their_devices_hold(tmp_path):
    """Measured: each of two processes reads half of a matrix, and the headers.

    Orbax also reads gaps of 4,096 bytes, here half of a row of `narrow`, so it reads that whole.
    """
    tensors = {
        "rows": np.random.default_rng(0).random((512, 4096), "float32"),
        "columns": np.random.default_rng(1).random((64, 65536), "float32"),
        "narrow": np.random.default_rng(2).random((512, 2048), "float32"),
    }
    write_file(tmp_path / "model.safetensors", tensors)
    code = f"""
import sys, pathlib
import jax
import numpy as np
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from safetensors_io import open_directory, read

def characters():
    return int(open("/proc/self/io").read().split()[1])

auto = (jax.sharding.AxisType.Auto,) * 2
mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=auto)
folder = pathlib.Path({str(tmp_path)!r})
entries = open_directory(folder)
by_first, by_last = ("data", "model"), ("model", "data")
for name, spec in [("rows", by_first), ("columns", by_last), ("narrow", by_last)]:
    sharding = jax.NamedSharding(mesh, jax.P(*spec))
    shape = entries[name].shape
    target = jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)
    read(entries, {{name: target}}, with_orbax=True)  # what is imported is read now
    for with_orbax in (True, False):
        before = characters()
        array = read(entries, {{name: target}}, with_orbax)[name]
        jax.block_until_ready(array)
        print(name, with_orbax, characters() - before, entries[name].nbytes, flush=True)
        whole = np.memmap(entries[name].path, "float32", "r", entries[name].begin, shape)
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, whole[shard.index])
"""
    from lives import environment, free_address

    address = free_address()
    settings = environment(4) | {"PYTHONPATH": str(ROOT / "examples")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, address, str(number)],
            env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    try:
        for process in processes:
            said, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
            rows = [line.split() for line in said.splitlines()]
            assert len(rows) == 6
            for name, with_orbax, count, nbytes in rows:
                if with_orbax == "True":
                    needed = 1 if name == "narrow" else 0.5
                    assert needed <= int(count) / int(nbytes) < needed + 0.05, (name, count)
                else:  # through pages of the file, which are not counted
                    assert int(count) < 0.05 * int(nbytes), (name, count)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_mapped_file_is_copied_for_own_devices_alone(small, monkeypatch):
    """The pieces that are copied from the mapped file have as many bytes as the devices hold."""
    entries, copied = open_directory(small), []
    monkeypatch.setattr(
        "safetensors_io.np.array", lambda piece: copied.append(piece.nbytes) or np.asarray(piece)
    )
    sharding = jax.NamedSharding(mesh_of(2, 4), jax.P("model", "data"))
    entry = entries["lm_head.weight"]
    target = jax.ShapeDtypeStruct(entry.shape, entry.dtype, sharding=sharding)
    read(entries, {"lm_head.weight": target}, with_orbax=False)
    assert copied == 8 * [entry.nbytes // 8]


def test_putting_tensors_into_place_and_merging_move_nothing_between_devices(small):
    """Transposing, stacking and adding an adapter's product compile to programs without collectives."""
    with compilations("llama.jax.jit") as compiled:
        model = loaded(small, mesh_of(2, 4), rank=4)
        before = len(compiled)
        merged(model)
    assert before > 20 and len(compiled) == before + 7
    assert not any(len(ms.collectives(program)) for program in compiled)


# ---- what is refused --------------------------------------------------------------------------


def change(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def header(path, edit):
    """Change the header of a file, and not the bytes of its tensors."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    described = json.loads(data[8 : 8 + length])
    edit(described)
    text = json.dumps(described).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def listed(folder, edit):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def overwrite(path, at, data):
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


ONE, TWO = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
NORM, HEAD = "model.norm.weight", "lm_head.weight"
DAMAGE = {  # what is done to a directory, and a part of the sentence
    "no-directory": (lambda d: (d / "config.json").unlink(), "config.json is missing"),
    "no-weights": (
        lambda d: (d / "model.safetensors.index.json").unlink(),
        "neither model.safetensors nor model.safetensors.index.json",
    ),
    "shard-missing": (lambda d: (d / TWO).unlink(), f"{TWO} is missing: download it again"),
    "truncated": (
        lambda d: (d / TWO).write_bytes((d / TWO).read_bytes()[:-10]),
        f"{TWO} is truncated: its header describes",
    ),
    "truncated-in-header": (
        lambda d: (d / ONE).write_bytes((d / ONE).read_bytes()[:100]),
        f"{ONE} is truncated: it has 100 bytes",
    ),
    "empty": (lambda d: (d / ONE).write_bytes(b""), f"{ONE} is truncated: it has 0"),
    "longer": (
        lambda d: (d / ONE).write_bytes((d / ONE).read_bytes() + b"more"),
        "has bytes that belong to no tensor",
    ),
    "header-oversized": (
        lambda d: overwrite(d / ONE, 0, (1 << 40).to_bytes(8, "little")),
        "says that its header has 1,099,511,627,776 bytes, more than the format allows",
    ),
    "header-not-json": (lambda d: overwrite(d / ONE, 8, b"\x80"), f"{ONE} has no valid JSON"),
    "header-of-brackets": (
        lambda d: (d / ONE).write_bytes((200_000).to_bytes(8, "little") + b"[" * 200_000),
        f"{ONE} has no valid JSON",
    ),
    "key-twice": (
        lambda d: (d / ONE).write_bytes((14).to_bytes(8, "little") + b'{"a":1, "a":1}'),
        "a key is there twice",
    ),
    "offsets-overlap": (
        lambda d: header(d / TWO, lambda h: h[HEAD].update(data_offsets=[0, 256 * 64 * 2])),
        "overlaps another tensor or leaves a gap before it",
    ),
    "offsets-negative": (
        lambda d: header(d / TWO, lambda h: h[HEAD].update(data_offsets=[-1, 2])),
        f"{HEAD} has no valid dtype, shape and data_offsets",
    ),
    "offsets-and-shape": (
        lambda d: header(d / TWO, lambda h: h[HEAD].update(shape=[256, 32])),
        f"{HEAD} has shape (256, 32) and dtype BF16, which is 16,384 bytes",
    ),
    "dtype-unknown": (
        lambda d: header(d / TWO, lambda h: h[HEAD].update(dtype="F4")),
        f"{HEAD} has dtype F4, which is not supported here",
    ),
    "index-names-a-missing-tensor": (
        lambda d: listed(d, lambda names: names.update({"model.extra": ONE})),
        f"says model.extra is in {ONE}, but that file lacks it",
    ),
    "index-forgets-a-tensor": (
        lambda d: listed(d, lambda names: names.pop(NORM)),
        f"{TWO} has {NORM}, but the index does not say so",
    ),
    "index-leaves-the-directory": (
        lambda d: listed(d, lambda names: names.update({NORM: "../secret.safetensors"})),
        f"says {NORM} is in '../secret.safetensors', which is not in this directory",
    ),
    "index-absolute": (
        lambda d: listed(d, lambda names: names.update({NORM: "/etc/passwd"})),
        f"says {NORM} is in '/etc/passwd', which is not in this directory",
    ),
    "index-names-a-pickle": (
        lambda d: listed(d, lambda names: names.update({NORM: "pytorch_model.bin"})),
        "is in pytorch_model.bin: only .safetensors is ever opened",
    ),
    "index-without-a-map": (
        lambda d: change(d / "model.safetensors.index.json", weight_map={}),
        "has no weight_map",
    ),
    "two-sets-of-weights": (
        lambda d: (d / "model.safetensors").write_bytes((d / ONE).read_bytes()),
        "remove the one that is stale",
    ),
    "wrong-shape": (
        lambda d: header(d / TWO, lambda h: h[HEAD].update(shape=[128, 128])),
        f"{HEAD} has shape (128, 128), but the configuration asks for (256, 64)",
    ),
    "dtype-changed": (
        lambda d: change(d / "config.json", torch_dtype="float16"),
        "is bfloat16, but the configuration says float16",
    ),
    "head-absent": (
        lambda d: (
            change(d / "config.json", tie_word_embeddings=True),
            make(d, tie_word_embeddings=True),
            change(d / "config.json", tie_word_embeddings=False),
        ),
        "lm_head.weight is missing, and tie_word_embeddings in config.json is not true",
    ),
    "head-of-a-tied-model": (
        lambda d: change(d / "config.json", tie_word_embeddings=True),
        "lm_head.weight is in the files, but not a weight of the model",
    ),
    "fewer-layers": (
        lambda d: change(d / "config.json", num_hidden_layers=2),
        "model.layers.2.input_layernorm.weight is in the files, but not a weight of the model",
    ),
    "more-layers": (
        lambda d: change(d / "config.json", num_hidden_layers=4),
        "model.layers.3.input_layernorm.weight is missing in the files",
    ),
    "architecture": (
        lambda d: change(d / "config.json", architectures=["Qwen3ForCausalLM"]),
        "says ['Qwen3ForCausalLM'], and this program knows LlamaForCausalLM alone",
    ),
    "biases": (
        lambda d: change(d / "config.json", attention_bias=True),
        "asks for attention_bias, which the model in llama.py does not have",
    ),
    "other-rope": (
        lambda d: change(d / "config.json", rope_scaling={"type": "yarn", "factor": 4.0}),
        "asks for rope_type yarn, which the model",
    ),
    "quantized": (
        lambda d: change(d / "config.json", quantization_config={"bits": 4}),
        "asks for quantization_config",
    ),
    "size-missing": (
        lambda d: change(d / "config.json", hidden_size=None),
        "lacks something or has it in another form",
    ),
    "config-not-json": (
        lambda d: (d / "config.json").write_text("{"),
        "config.json is not a JSON object",
    ),
}


def failure(monkeypatch, capsys, *arguments):
    """What the program says when it ends with an error, after `finetune.py: `."""
    monkeypatch.setattr(sys, "argv", ["finetune.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        finetune.main()
    assert isinstance(ended.value.code, str)  # then the exit status is 1, and this is on stderr
    return ended.value.code.removeprefix("finetune.py: ")


@pytest.fixture
def tokens(tmp_path):
    np.save(tmp_path / "tokens.npy", np.tile(np.arange(256, dtype=np.int32), 4))
    return tmp_path / "tokens.npy"


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_wrong_is_said_in_one_sentence_and_nothing_is_written(
    tmp_path, name, monkeypatch, capsys, tokens
):
    damage, sentence = DAMAGE[name]
    make(tmp_path / "model")
    damage(tmp_path / "model")
    said = failure(
        monkeypatch, capsys, tmp_path / "model", "--tokens", tokens, "--out", tmp_path / "new",
        "--batch", 8, "--length", 8, "--steps", 1,
    )  # fmt: skip
    assert sentence in said and "\n" not in said and len(said) < 400
    assert {path.name for path in tmp_path.iterdir()} == {"model", "tokens.npy"}


ARGUMENTS = {
    "model-does-not-divide": (("--model", 3), "--model 3 does not divide 8 devices"),
    "batch": (("--batch", 3), "--batch 3 is not divided by 8 devices"),
    "out-there": (("--out", "."), ". is there already: choose another --out"),
    "tokens-missing": (("--tokens", "none.npy"), "none.npy cannot be read as an array"),
    "tokens-too-few": (("--length", 2000), "has 1024 tokens: a sequence needs 2002"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_do_not_fit_are_refused(small, name, monkeypatch, capsys, tokens):
    more, sentence = ARGUMENTS[name]
    assert sentence in failure(monkeypatch, capsys, small, "--tokens", tokens, *more)


def test_a_size_that_the_mesh_does_not_divide_is_named(tmp_path, monkeypatch, capsys):
    make(tmp_path / "model", intermediate_size=100)
    said = failure(monkeypatch, capsys, tmp_path / "model", "--model", 8)
    assert said == "intermediate_size is 100, which 8 devices do not divide: change --model"


@pytest.mark.parametrize("bad", ["float", "two-dimensional", "too-large", "pickled"])
def test_tokens_that_the_model_does_not_know_are_refused(small, tmp_path, bad, monkeypatch, capsys):
    arrays = {
        "float": (np.ones(200), "has shape (200,) and dtype float64"),
        "two-dimensional": (np.ones((20, 20), int), "has shape (20, 20)"),
        "too-large": (np.full(200, 256), "has token 256, and the model knows 256"),
        "pickled": (np.array([{}] * 200, object), "cannot be read as an array"),
    }
    array, sentence = arrays[bad]
    np.save(tmp_path / "tokens.npy", array, allow_pickle=True)
    assert sentence in failure(
        monkeypatch, capsys, small, "--tokens", tmp_path / "tokens.npy", "--length", 8
    )


class Bomb:
    def __reduce__(self):
        return sys.exit, ("a pickle was opened",)


def test_no_pickle_is_ever_opened(tmp_path):
    """Files .bin, .pt and .safetensors that the index does not list are beside the weights."""
    folder = tmp_path / "model"
    make(folder)
    for name in ("pytorch_model.bin", "consolidated.pt", "stray.safetensors", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps(Bomb()))
    opened = []
    sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
    model = loaded(folder, mesh_of(1, 2))
    write_like(
        folder, tmp_path / "new", finetune.tensors_of(merged(model), read_config(folder), {})
    )
    mine = {finetune.Path(path).name for path in opened if path.startswith(str(tmp_path))}
    assert {ONE, TWO, "config.json"} <= mine
    assert not {name for name in mine if name.endswith((".bin", ".pt")) or "stray" in name}
    assert not list((tmp_path / "new").glob("*.bin")) + list((tmp_path / "new").glob("stray*"))


# ---- training, and back to the files ----------------------------------------------------------


def test_what_is_not_trained_is_written_back_byte_for_byte(small, tmp_path):
    """Loaded onto eight devices and written: the files are the same, and so is all beside them."""
    model = loaded(small, mesh_of(2, 4))
    (small / "tokenizer.json").write_text("{}")
    weights = merged(model)
    write_like(small, tmp_path / "new", finetune.tensors_of(weights, read_config(small), {}))
    files = sorted(path.name for path in small.iterdir())
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == files
    for name in files:
        assert cmp(tmp_path / "new" / name, small / name, shallow=False), name


def test_a_write_that_fails_leaves_nothing(small, tmp_path):
    tensors = read_all(small)

    def tensor_of(name):
        if name == NORM:
            raise OSError(28, "No space left on device")
        return tensors[name]

    with pytest.raises(OSError, match="No space left"):
        write_like(small, tmp_path / "new", tensor_of)
    assert not list(tmp_path.iterdir())
    with pytest.raises(BadWeights, match=r"is float64 of shape \(2,\), and was bfloat16"):
        write_like(small, tmp_path / "new", lambda name: np.zeros(2))
    assert not list(tmp_path.iterdir())


def test_only_adapters_have_state_in_the_optimizer_and_groups_have_their_own_rate(small):
    """Two moments of float32 for A and B, sharded as they are; B moves sixteen times as far."""
    mesh = mesh_of(2, 4)
    model = loaded(small, mesh, rank=4)
    with jax.set_mesh(mesh):
        optimizer = finetune.make_optimizer(model, 1e-3, 16)
    adapters = by_path(nnx.state(model, nnx.LoRAParam))
    held = sum(2 * adapter.nbytes for adapter in adapters.values())
    arrays = [array for array in jax.tree.leaves(nnx.state(optimizer)) if array.ndim]
    assert sum(array.nbytes for array in arrays) == held and len(arrays) == 4 * 7
    moments = by_path(nnx.state(optimizer))
    for path, adapter in adapters.items():
        mine = [m for name, m in moments.items() if name.endswith(path) and hasattr(m, "sharding")]
        assert len(mine) == 2
        assert all(m.sharding.is_equivalent_to(adapter.sharding, adapter.ndim) for m in mine)
    gradients = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.LoRAParam))
    before = {path: np.asarray(adapter[...]) for path, adapter in adapters.items()}
    with jax.set_mesh(mesh):
        optimizer.update(model, gradients)
    for path, adapter in by_path(nnx.state(model, nnx.LoRAParam)).items():
        moved = np.abs(np.asarray(adapter[...]) - before[path]).mean()
        np.testing.assert_allclose(moved, 16e-3 if "lora_b" in path else 1e-3, rtol=0.05)


def trained(folder, tokens, out, monkeypatch, capsys, *more):
    given = ("--tokens", tokens, "--out", out, "--steps", 6, "--length", 16, "--rank", 4)
    arguments = [folder, *given, "--learning-rate", 1e-2, *more]
    monkeypatch.setattr(sys, "argv", ["finetune.py", *map(str, arguments)])
    finetune.main()
    return capsys.readouterr().out


def losses_in(said):
    """The first and the last loss that the program prints."""
    first, last = (float(word) for word in said.split() if word[1:2] == ".")
    return first, last


def test_two_meshes_train_alike(tokens, tmp_path, monkeypatch, capsys):
    """On 2 × 4 and on 8 × 1 the losses agree, in float32: in bfloat16 they drift apart by percents."""
    make(tmp_path / "model", torch_dtype="float32")
    losses = [
        losses_in(trained(tmp_path / "model", tokens, out, monkeypatch, capsys, "--model", model))
        for out, model in [(tmp_path / "one", 4), (tmp_path / "two", 1)]
    ]
    np.testing.assert_allclose(*losses, rtol=1e-3)


def test_the_program_trains_merges_and_writes_what_others_read(
    small, tokens, tmp_path, monkeypatch, capsys
):
    """The loss falls; the merged model is that with adapters, rounded to the files' dtype."""
    said = trained(small, tokens, tmp_path / "new", monkeypatch, capsys, "--model", 4)
    first, last = losses_in(said)
    assert last < first - 0.1
    old, new = read_all(small), read_all(tmp_path / "new")
    assert {n: (t.shape, t.dtype) for n, t in old.items()} == {
        n: (t.shape, t.dtype) for n, t in new.items()
    }
    adapted = {name for name in old if "_proj" in name}
    same(
        {n: t for n, t in old.items() if n not in adapted},
        {n: t for n, t in new.items() if n not in adapted},
    )
    assert all((bits(old[name]) != bits(new[name])).any() for name in adapted)
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    loss = cross_entropy(forward(config, new, batch(tokens)[:, :-1]), batch(tokens)[:, 1:])
    before = cross_entropy(forward(config, old, batch(tokens)[:, :-1]), batch(tokens)[:, 1:])
    assert loss < before - 0.1


def batch(tokens):
    return np.load(tokens)[: 8 * 17].reshape(8, 17)


def cross_entropy(logits, targets):
    shifted = logits - logits.max(-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -np.take_along_axis(logs, targets[..., None], -1).mean()


def test_two_processes_write_what_one_does(small, tokens, tmp_path):
    """--processes: adapters that are not trained change nothing, so the files are the same."""
    from lives import environment, free_address

    address = free_address()
    command = [
        sys.executable, PROGRAM, small, "--model", 4, "--tokens", tokens, "--out", tmp_path / "new",
        "--steps", 1, "--length", 8, "--learning-rate", 0,
        "--processes", 2, "--coordinator", address, "--process",
    ]  # fmt: skip
    processes = [
        subprocess.Popen(
            [str(word) for word in (*command, number)],
            env=environment(4), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    try:
        for number, process in enumerate(processes):
            said, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors
            assert ("the merged model is in" in said) == (number == 0)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    same(read_all(tmp_path / "new"), read_all(small))
