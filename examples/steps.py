"""The recipe: optimizer and schedule, one training step, the test, and text from the model.

All of it runs under jit on global arrays, so it is the same for every strategy; the one thing that
knows the mesh is the accumulation of gradients.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

import dataset
import model as models
from model import Config, Model
from strategies import ROWS, STRATEGIES, P


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the weights are trained, beside the model's own settings."""

    learning_rate: float  # at the end of the warm-up
    warm_up: int  # steps, from 0
    decay_steps: int  # from the first step to the end of the cosine
    final_rate: float  # what is left then, as a part of learning_rate
    weight_decay: float
    beta2: float
    clip: float  # the largest norm of the gradient; 0 clips nothing
    seed: int


class Run(NamedTuple):
    """All that training changes, and so all that a checkpoint must hold."""

    model: Model
    optimizer: nnx.Optimizer


def schedule_of(recipe: Recipe) -> optax.Schedule:
    rate, end = recipe.learning_rate, recipe.learning_rate * recipe.final_rate
    steps = max(recipe.decay_steps, recipe.warm_up + 1)
    return optax.warmup_cosine_decay_schedule(0.0, rate, recipe.warm_up, steps, end)


def optimizer_of(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW. Made once, outside of jit: JAX compares it by identity."""

    def decays(weights: Any) -> Any:
        """Matrices decay, and the scales of norms do not."""
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "scale" not in jax.tree_util.keystr(path), weights
        )

    adamw = optax.adamw(
        schedule_of(recipe), b2=recipe.beta2, weight_decay=recipe.weight_decay, mask=decays
    )
    # The norm of global arrays is the norm over all devices. Inside shard_map it would not be.
    clip = optax.clip_by_global_norm(recipe.clip) if recipe.clip else optax.identity()
    return optax.chain(clip, adamw)


def make_run(config: Config, strategy: str, tx: optax.GradientTransformation, seed: int) -> Run:
    """The start of a run."""
    model = Model(config, nnx.Rngs(seed))
    if axis := STRATEGIES[strategy].moments:
        for path, weight in nnx.to_flat_state(nnx.state(model, nnx.Param)):
            if "scale" not in str(path[-1]):  # these are small
                spec = tuple(axis if name == "fsdp" else name for name in weight.out_sharding)
                weight.set_metadata(optimizer_sharding=spec)
    return Run(model, nnx.Optimizer(model, tx, wrt=nnx.Param))


# ---- one step -------------------------------------------------------------------------------


def loss_and_gradients(
    model: Model, tokens_BS: jax.Array, accumulate: int, mesh: Mesh
) -> tuple[jax.Array, Any]:
    """Mean over the batch, of which one microbatch after another is in memory.

    Gradients that are whole on each device of `data` are added up there, and summed over `data`
    once, at the end: so they have a dimension N for it. Those that `fsdp` splits are summed over
    `fsdp` after each microbatch, because a device that waited would have to hold all of them.
    """
    if accumulate == 1:
        return nnx.value_and_grad(models.loss_of)(model, tokens_BS)
    graphdef, weights, *rest = nnx.split(model, nnx.Param, ...)

    def one(weights: Any, tokens_bS: jax.Array) -> tuple[jax.Array, Any]:
        def loss(weights: Any) -> jax.Array:
            return models.loss_of(nnx.merge(graphdef, weights, *rest), tokens_bS, rows=("fsdp",))

        return jax.value_and_grad(loss)(weights)

    def unsummed(gradient: nnx.Param) -> Any:
        spec = P("data", *gradient.out_sharding)
        return gradient.replace(jax.lax.with_sharding_constraint(gradient[...], spec))

    def is_weight(leaf: Any) -> bool:
        return isinstance(leaf, nnx.Param)

    def each(tokens_NbS: jax.Array) -> tuple[jax.Array, Any]:
        loss_N, gradients_N = jax.vmap(one, in_axes=(None, 0), spmd_axis_name="data")(
            weights, tokens_NbS
        )
        return loss_N, jax.tree.map(unsummed, gradients_N, is_leaf=is_weight)

    def add(total: Any, tokens_NbS: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, each(tokens_NbS)), None

    tokens_MNbS = microbatches(tokens_BS, accumulate, mesh)
    shapes = jax.eval_shape(each, tokens_MNbS[0])
    nothing = jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype), shapes)
    total, _ = jax.lax.scan(add, nothing, tokens_MNbS)
    return jax.tree.map(lambda part_N: part_N.mean(0) / accumulate, total)


def microbatches(tokens_BS: jax.Array, M: int, mesh: Mesh) -> jax.Array:
    """The rows of each device, in M parts: M, devices of `data`, rows, positions. Nothing moves."""
    N, n = mesh.shape["data"], mesh.shape["fsdp"]
    parts = tokens_BS.reshape(N, n, M, -1, tokens_BS.shape[-1])
    tokens_MNbS = parts.transpose(2, 0, 1, 3, 4).reshape(M, N, -1, tokens_BS.shape[-1])
    return jax.lax.with_sharding_constraint(tokens_MNbS, P(None, "data", "fsdp"))


def compiled_step(places: Run, mesh: Mesh, accumulate: int) -> jax.stages.Wrapped:
    """Donated, so that old and new state share memory; pinned, so that no sharding drifts."""

    def step(run: Run, tokens_BS: jax.Array) -> tuple[Run, jax.Array, jax.Array]:
        loss, gradients = loss_and_gradients(run.model, tokens_BS, accumulate, mesh)
        norm = optax.tree.norm(gradients)
        run.optimizer.update(run.model, gradients)
        return run, loss, norm

    everywhere = jax.NamedSharding(mesh, P())  # so that every process can read the two numbers
    return jax.jit(step, donate_argnums=0, out_shardings=(places, everywhere, everywhere))


def batch_shape(mesh: Mesh, size: int, S: int) -> jax.ShapeDtypeStruct:
    sharding = jax.NamedSharding(mesh, P(ROWS))
    return jax.ShapeDtypeStruct((size, S + 1), "int32", sharding=sharding)


def bytes_held(run: Run) -> int:
    """Bytes of weights and moments on each device."""
    leaves = jax.tree.leaves(run)
    shares = [math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves]
    return sum(share * leaf.dtype.itemsize for share, leaf in zip(shares, leaves))


# ---- the test, and text ---------------------------------------------------------------------


def compiled_test(
    test: dataset.Tokens, most: int, size: int, mesh: Mesh
) -> Callable[[Model], float]:
    """Mean loss over the rows that are held out, at most so many.

    The last batch is filled up with rows of weight 0; losses are summed, and divided once.
    """
    sharding = jax.NamedSharding(mesh, P(ROWS))
    count, here = min(len(test), most), dataset.rows_here(sharding, size)
    batches = []
    for first in range(0, count, size):
        numbers = first + here
        rows = np.stack([test[number % len(test)] for number in numbers])
        weights = (numbers < count).astype("float32")
        batches.append([dataset.placed(part, size, sharding) for part in (rows, weights)])

    def sum_of(model: Model, tokens_BS: jax.Array, weights_B: jax.Array) -> jax.Array:
        return (models.losses_of(model, tokens_BS) * weights_B).sum()

    compiled = jax.jit(sum_of, out_shardings=jax.NamedSharding(mesh, P()))

    def test_loss(model: Model) -> float:
        return sum(float(compiled(model, *batch)) for batch in batches) / count

    return test_loss


def compiled_sample(mesh: Mesh, S: int, temperature: float = 0.8) -> Callable[..., bytes]:
    """Continue a text byte by byte. A cache of keys and values would do so faster."""
    ways, everywhere = mesh.shape["data"] * mesh.shape["fsdp"], jax.NamedSharding(mesh, P())

    @functools.partial(jax.jit, out_shardings=everywhere)
    def next_token(model: Model, window_S: jax.Array, last: int, key: jax.Array) -> jax.Array:
        tokens_BS = jnp.broadcast_to(window_S, (ways, S))  # a row for each device
        return jax.random.categorical(key, model(tokens_BS)[0, last] / temperature)

    def sample(model: Model, prompt: bytes, count: int, seed: int) -> bytes:
        text, key = bytearray(prompt), jax.random.key(seed)
        for number in range(count):
            seen = text[-S:]
            window_S = np.frombuffer(bytes(seen).ljust(S, b" "), np.uint8).astype("int32")
            step_key = jax.random.fold_in(key, number)
            text.append(int(next_token(model, window_S, len(seen) - 1, step_key)) % 256)
        return bytes(text)

    return sample
