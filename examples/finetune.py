"""Fine-tune a Llama model from a Hugging Face directory with LoRA, on any mesh, and write it back.

    python examples/finetune.py DIR                                  load it, and say what is where
    python examples/finetune.py DIR --tokens tokens.npy --out NEW    train adapters, merge, write NEW

    JAX_NUM_CPU_DEVICES=8 python examples/finetune.py DIR --model 4  on 2 × 4 simulated devices

DIR has config.json and *.safetensors. tokens.npy is one row of token ids, made by the tokenizer of
the model. NEW has the same files, names, shapes and dtypes, so whatever reads DIR reads NEW.

The page https://many-devices.github.io/one-program/book/own-weights.html explains it.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils

from llama import NAMES, Config, add_adapters, check_names, load, merged, read_config
from safetensors_io import BadWeights, Entry, open_directory, read, reader_of_orbax, write_like

P = jax.P


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="config.json and *.safetensors")
    parser.add_argument("--tokens", type=Path, help="token ids, a row of integers (.npy)")
    parser.add_argument("--out", type=Path, help="where to write the merged model")
    parser.add_argument("--model", type=int, default=1, help="devices that share each matrix")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--length", type=int, default=128, help="tokens per sequence")
    parser.add_argument(
        "--learning-rate", type=float, default=2e-4, help="of A, half of an adapter"
    )
    parser.add_argument("--b-times", type=float, default=16, help="how much larger it is for B")
    parser.add_argument("--mapped", action="store_true", help="read with mmap, without Orbax")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="of this run")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, if not found")
    parser.add_argument("--process", type=int, metavar="I", help="which of them this is")
    return parser.parse_args()


def make_mesh(config: Config, model: int) -> jax.sharding.Mesh:
    """Return a mesh with `model` devices for tensor parallelism and the others for FSDP."""
    count = jax.device_count()
    if model < 1 or count % model:
        raise BadWeights(f"--model {model} does not divide {count} devices: choose another")
    data = count // model
    divided = {
        "hidden_size": (config.D, data),
        "vocab_size": (config.V, model),
        "intermediate_size": (config.F, model),
        "num_attention_heads × head_dim": (config.H * config.C, model),
        "num_key_value_heads × head_dim": (config.K * config.C, model),
    }
    for name, (size, parts) in divided.items():
        if size % parts:
            raise BadWeights(
                f"{name} is {size}, which {parts} devices do not divide: change --model"
            )
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((data, model), ("data", "model"), axis_types=auto)


def read_tokens(path: Path, config: Config, length: int) -> np.ndarray:
    """Return token ids, (N,). Raises BadWeights if they are not those of the model."""
    try:
        tokens_N = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise BadWeights(f"{path} cannot be read as an array: {error}") from error
    if tokens_N.ndim != 1 or tokens_N.dtype.kind not in "iu":
        raise BadWeights(f"{path} has shape {tokens_N.shape} and dtype {tokens_N.dtype}, not (N,)")
    if len(tokens_N) < length + 2:
        raise BadWeights(f"{path} has {len(tokens_N)} tokens: a sequence needs {length + 2}")
    if tokens_N.min() < 0 or tokens_N.max() >= config.V:
        raise BadWeights(f"{path} has token {tokens_N.max()}, and the model knows {config.V}")
    return tokens_N


# ---- training ---------------------------------------------------------------------------------


def make_optimizer(model: nnx.Module, rate: float, b_times: float) -> nnx.Optimizer:
    """Return AdamW for the adapters alone, with a larger rate for B (arXiv 2402.12354)."""

    def group_of(path, _):
        return "B" if "lora_b" in jax.tree_util.keystr(path) else "A"

    groups = {"A": optax.adamw(rate), "B": optax.adamw(b_times * rate)}
    by_group = optax.partition(
        groups, lambda weights: jax.tree_util.tree_map_with_path(group_of, weights)
    )
    clipped = optax.chain(optax.clip_by_global_norm(1.0), by_group)
    return nnx.Optimizer(model, clipped, wrt=nnx.LoRAParam)


def loss_of(model: nnx.Module, tokens_BS: jax.Array) -> jax.Array:
    """Mean cross entropy of the next token."""
    logits_BSV = model(tokens_BS[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BSV, tokens_BS[:, 1:]).mean()


def step(
    model: nnx.Module, optimizer: nnx.Optimizer, tokens_BS: jax.Array
) -> tuple[nnx.Module, nnx.Optimizer, jax.Array]:
    adapters = nnx.DiffState(0, nnx.LoRAParam)
    loss, gradients = nnx.value_and_grad(loss_of, argnums=adapters)(model, tokens_BS)
    optimizer.update(model, gradients)
    return model, optimizer, loss


def train(
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    tokens_N: np.ndarray,
    mesh: jax.sharding.Mesh,
    given: argparse.Namespace,
) -> tuple[nnx.Module, list[float]]:
    """Return the model after `given.steps` steps, and the loss of each."""
    shardings = jax.tree.map(lambda array: array.sharding, (model, optimizer))
    rows = jax.NamedSharding(mesh, P("data"))
    losses = []
    with jax.set_mesh(mesh):
        compiled = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*shardings, None))
        for number in range(given.steps):
            draw = np.random.default_rng(number)  # the same batch on any mesh, in every process
            begins = draw.integers(len(tokens_N) - given.length - 1, size=given.batch)
            tokens_BS = np.stack([tokens_N[begin:][: given.length + 1] for begin in begins])
            batch = jax.make_array_from_callback(
                tokens_BS.shape, rows, lambda piece, all=tokens_BS: all[piece].astype(np.int32)
            )
            model, optimizer, loss = compiled(model, optimizer, batch)
            losses.append(loss)
    return model, [float(loss) for loss in losses]


# ---- back to the files ------------------------------------------------------------------------


def tensors_of(
    weights: dict[str, jax.Array], config: Config, entries: dict[str, Entry]
) -> Callable[[str], np.ndarray]:
    """Return a function that returns one tensor, by its name in the files, on this host."""
    where = {
        name.format(n=n): (path, n if "{n}" in name else None, transposed)
        for path, name, transposed in NAMES
        if path in weights
        for n in range(config.L)
    }

    def tensor_of(name: str) -> np.ndarray:
        if name not in where:  # of old files: it is computed and not loaded
            entry = entries[name]
            return np.array(np.memmap(entry.path, entry.dtype, "r", entry.begin, entry.shape))
        path, layer, transposed = where[name]
        array = weights[path] if layer is None else weights[path][layer]
        if jax.process_count() > 1:
            tensor = multihost_utils.process_allgather(array, tiled=True)
        else:
            tensor = np.asarray(array)
        return tensor.T if transposed else tensor

    return tensor_of


def say(*words: object) -> None:
    if jax.process_index() == 0:
        print(*words, flush=True)


def say_what_is_where(model: nnx.Module, mesh: jax.sharding.Mesh) -> None:
    arrays = jax.tree.leaves(nnx.state(model, nnx.Param))
    whole = sum(array.nbytes for array in arrays)
    piece = sum(array.addressable_shards[0].data.nbytes for array in arrays)
    say(f"{whole:,} bytes of weights, {piece:,} on each device of {dict(mesh.shape)}")


def run(given: argparse.Namespace) -> None:
    config, entries = read_config(given.folder), open_directory(given.folder)
    check_names(entries, config)
    mesh = make_mesh(config, given.model)
    if given.tokens and given.batch % mesh.shape["data"]:
        raise BadWeights(f"--batch {given.batch} is not divided by {mesh.shape['data']} devices")
    tokens_N = read_tokens(given.tokens, config, given.length) if given.tokens else None
    if given.out and tokens_N is None:
        raise BadWeights("--out needs --tokens: there is nothing new to write")
    if given.out and given.out.exists():
        raise BadWeights(f"{given.out} is there already: choose another --out")
    with_orbax = reader_of_orbax() and not given.mapped
    if not with_orbax:
        say("Reading with mmap: Orbax has no safetensors reader (0.12.2) or --mapped was given.")
    model = load(partial(read, entries, with_orbax=with_orbax), config, mesh)
    say_what_is_where(model, mesh)
    if tokens_N is None:
        return
    with jax.set_mesh(mesh):
        add_adapters(model, given.rank)
        optimizer = make_optimizer(model, given.learning_rate, given.b_times)
    began = time.monotonic()
    model, losses = train(model, optimizer, tokens_N, mesh, given)
    seconds = time.monotonic() - began
    say(
        f"loss {losses[0]:.3f} at step 0, {losses[-1]:.3f} at step {given.steps - 1} ({seconds:.0f} s)"
    )
    if given.out:
        write_like(given.folder, given.out, tensors_of(merged(model), config, entries))
        say(f"the merged model is in {given.out}")


def main() -> None:
    given = arguments()
    if given.processes > 1:  # a cluster that JAX knows needs no address
        jax.distributed.initialize(given.coordinator, given.processes, given.process)
    try:
        run(given)
    except BadWeights as error:
        sys.exit(f"finetune.py: {error}")


if __name__ == "__main__":
    main()
