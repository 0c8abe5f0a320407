"""The book's model, and five strategies that place it on a mesh of devices.

Importing this file touches no device, so a program can still choose its devices, or call
`jax.distributed.initialize`, after the import.

Names end in their dimensions: B batch, I pixels, D model, F hidden, L layers, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

P = jax.P
CLASSES = 10  # digits
ZERO1_SIZE = 4096  # moments of fewer numbers stay whole: splitting them saves less than it costs


class Refused(Exception):
    """Settings that cannot work. The message says why, and what to change."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes, and how the model computes. Weights and moments are float32 whatever `compute` is."""

    L: int = 4  # layers
    D: int = 96  # model width
    F: int = 384  # hidden width
    I: int = 64  # noqa: E741  pixels of an image
    V: int = 16  # ten classes, padded to a number that more meshes divide
    compute: str = "float32"
    remat: bool = False  # compute a layer again in the backward pass, and save only its input


@dataclasses.dataclass(frozen=True)
class Strategy:
    """Which mesh axis splits what. The batch is always split over `data`."""

    says: str
    fsdp: str | None = None  # the mesh axis over which weights are stored split as well
    moments: str | None = None  # ZeRO-1: the optimizer's moments are, and weights stay whole
    model: bool = False  # may `model` have more than one device?


STRATEGIES = {
    "data-parallel": Strategy("every device holds the model and takes its share of the batch"),
    "zero1": Strategy("data parallel, with the optimizer's moments split", moments="data"),
    "fsdp": Strategy("data parallel, with weights and moments split", fsdp="data"),
    "tensor": Strategy("weights split over `model`, which shares the matmuls", model=True),
    "fsdp-tensor": Strategy("both: split over `data` and over `model`", fsdp="data", model=True),
}


class Batch(NamedTuple):
    images_BI: jax.Array
    labels_B: jax.Array
    weights_B: jax.Array  # 0 for the rows that only fill up a batch, else 1


class Run(NamedTuple):
    """All that training changes, and so all that a checkpoint must hold."""

    model: "Model"
    optimizer: nnx.Optimizer
    rngs: nnx.Rngs


Fits = Callable[[str, int, int], bool]  # of a strategy and the devices on `data` and on `model`


def make_mesh(name: str, data: int | None, model: int | None, fits: Fits = lambda *_: True) -> Mesh:
    """A `data` x `model` mesh of all devices; a size that is None follows from the other one.

    A refusal names sizes that work: those that `fits` accepts.
    """
    count = jax.device_count()
    if data is None and model is None:
        data, model = default_sizes(name, count)
    model = model or max(count // (data or 1), 1)
    data = data or max(count // model, 1)
    able = [key for key, strategy in STRATEGIES.items() if strategy.model or model == 1]
    if data * model != count:
        more = "only " if count < data * model else ""
        change = sizes_that_work(name, count, fits)
        if name in able and fits(name, data, model):
            change += f", or, to simulate devices on a CPU, add --cpu-devices {data * model}"
        raise Refused(
            f"--data {data} times --model {model} is {data * model} devices, and JAX sees "
            f"{more}{count}: {change}"
        )
    if name not in able:
        others = either([key for key in able if fits(key, data, model)])
        raise Refused(
            f"--strategy {name} splits nothing over `model`, so {model} devices would repeat the "
            f"same work: {f'use --strategy {others}, or ' if others else ''}"
            f"{sizes_that_work(name, count, fits)}"
        )
    slices = slice_count()
    if data % slices:
        raise Refused(f"--data {data} does not divide over {slices} slices: use a multiple of it")
    if slices > 1:  # only `data` may cross from one to another: `model` talks in every layer
        grid = mesh_utils.create_hybrid_device_mesh(
            (data // slices, model), (slices, 1), jax.devices()
        )
        return Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def default_sizes(name: str, count: int) -> tuple[int, int]:
    """Devices on `data` and on `model`, if nobody asked for others."""
    divisors = [size for size in range(1, count + 1) if count % size == 0]
    square = next(size for size in divisors if size * size >= count)
    model = {"tensor": count, "fsdp-tensor": square}.get(name, 1)
    return count // model, model


def slice_count() -> int:
    """A slice is a group of devices with fast links; of GPUs it is often one server."""
    return len({getattr(device, "slice_index", 0) for device in jax.devices()})


def pinned(x: jax.Array, *spec: str | None) -> jax.Array:
    """Without this the compiler may move activations where the strategy says to move weights."""
    return jax.lax.with_sharding_constraint(x, P(*spec))


class Block(nnx.Module):
    """x + w_FD(silu(w_DF(norm(x))))"""

    def __init__(self, config: Config, strategy: Strategy, rngs: nnx.Rngs):
        init, fsdp = nnx.initializers.lecun_normal(), strategy.fsdp
        up, down = (config.D, config.F), (config.F, config.D)
        self.scale_D = nnx.Param(jnp.ones(config.D), out_sharding=(None,))
        self.w_DF = nnx.Param(init(rngs.params(), up), out_sharding=(fsdp, "model"))
        self.b_F = nnx.Param(jnp.zeros(config.F), out_sharding=("model",))
        self.w_FD = nnx.Param(init(rngs.params(), down), out_sharding=("model", fsdp))
        self.b_D = nnx.Param(jnp.zeros(config.D), out_sharding=(None,))

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        x32_BD = x_BD.astype(jnp.float32)  # squares and their mean lose too much in bfloat16
        size_B1 = jnp.sqrt(jnp.mean(x32_BD**2, -1, keepdims=True) + 1e-6)
        norm_BD = (x32_BD / size_B1 * self.scale_D).astype(x_BD.dtype)
        h_BF = jax.nn.silu(norm_BD @ cast(self.w_DF, x_BD) + cast(self.b_F, x_BD))
        return x_BD + h_BF @ cast(self.w_FD, x_BD) + cast(self.b_D, x_BD)


class Model(nnx.Module):
    """Pixels to features, a stack of blocks, features to logits."""

    def __init__(self, config: Config, strategy: Strategy, rngs: nnx.Rngs):
        init, fsdp = nnx.initializers.lecun_normal(), strategy.fsdp
        enter, leave = (config.I, config.D), (config.D, config.V)
        self.w_ID = nnx.Param(init(rngs.params(), enter), out_sharding=("model", fsdp))
        stack = nnx.vmap(
            lambda rngs: Block(config, strategy, rngs),
            transform_metadata={nnx.PARTITION_NAME: None},
        )
        self.blocks = stack(rngs.split(config.L))
        self.w_DV = nnx.Param(init(rngs.params(), leave), out_sharding=(fsdp, "model"))
        self.config = config

    def __call__(self, images_BI: jax.Array) -> jax.Array:
        """Logits in float32, split over `data` and, like a vocabulary, over `model`."""
        x_BI = images_BI.astype(self.config.compute)
        x_BD = pinned(x_BI @ cast(self.w_ID, x_BI), "data", None)

        def layer(x_BD: jax.Array, block: Block) -> tuple[jax.Array, None]:
            return pinned(block(x_BD), "data", None), None

        if self.config.remat:
            layer = jax.checkpoint(layer, prevent_cse=False)  # a scan needs no such barrier
        x_BD, _ = jax.lax.scan(layer, x_BD, self.blocks)
        logits_BV = pinned(x_BD @ cast(self.w_DV, x_BD), "data", "model")
        return logits_BV.astype(jnp.float32)


def cast(weight: nnx.Param, like: jax.Array) -> jax.Array:
    """A float32 weight in the dtype of the computation: what is gathered is then as small."""
    return weight[...].astype(like.dtype)


def make_run(config: Config, name: str, tx: optax.GradientTransformation, seed: int) -> Run:
    """The start of a run. `tx` is made once, outside: JAX compares it by identity."""
    strategy = STRATEGIES[name]
    model = Model(config, strategy, nnx.Rngs(seed))
    if strategy.moments:
        for path, weight in nnx.to_flat_state(nnx.state(model, nnx.Param)):
            features = weight.shape[1:] if "blocks" in path else weight.shape  # without layers
            if math.prod(features) >= ZERO1_SIZE:
                spec: list[str | None] = [None] * weight.ndim
                spec[features.index(max(features)) - len(features)] = strategy.moments
                weight.set_metadata(optimizer_sharding=tuple(spec))
    return Run(model, nnx.Optimizer(model, tx, wrt=nnx.Param), nnx.Rngs(seed + 1))


def cross_entropy_B(model: Callable[[Any], jax.Array], batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Loss of each row, and whether it is right. Logits beyond the classes are masked."""
    logits_BV = model(batch.images_BI)
    vocabulary_V = jnp.arange(logits_BV.shape[-1])
    logits_BV = jnp.where(vocabulary_V < CLASSES, logits_BV, -1e30)
    # Picking a logit by its index would gather logits that are split; comparing does not.
    labels_BV = (batch.labels_B[:, None] == vocabulary_V).astype(jnp.float32)
    right_B = logits_BV.argmax(-1) == batch.labels_B
    return optax.softmax_cross_entropy(logits_BV, labels_BV), right_B


def loss_of(model: Model, batch: Batch) -> jax.Array:
    """Mean over the rows that count, so the filling of a short batch changes nothing."""
    loss_B, _ = cross_entropy_B(model, batch)
    return (loss_B * batch.weights_B).sum() / batch.weights_B.sum()


def sums_of(model: Model, batch: Batch) -> jax.Array:
    """[sum of losses, rows that are right, rows]: means of means are wrong over uneven batches."""
    loss_B, right_B = cross_entropy_B(model, batch)
    rows_B = jnp.ones_like(loss_B)
    return (jnp.stack([loss_B, right_B, rows_B]) * batch.weights_B).sum(-1)


def rows_here(sharding: jax.NamedSharding, count: int) -> np.ndarray:
    """Which of `count` rows this process's devices hold, in order."""
    indices = sharding.addressable_devices_indices_map((count,)).values()
    return np.unique([np.arange(count)[index] for index in indices])


# ---- sizes that divide, and what to change where they do not --------------------------------


class Split(NamedTuple):
    """A dimension that is split over an axis of the mesh."""

    flag: str  # that sets its size; without dashes, if no flag does
    size: int
    axis: str
    ways: int  # devices on that axis

    @property
    def divides(self) -> bool:
        return self.size % self.ways == 0


def splits(config: Config, name: str, data: int, model: int, batch: int) -> list[Split]:
    strategy, sizes = STRATEGIES[name], dataclasses.asdict(config)
    over_data = ["D"] if strategy.fsdp else ["D", "F"] if strategy.moments else []
    flags = {"D": "--D", "F": "--F"}
    return [
        Split("--batch", batch, "data", data),
        *(Split(flags[size], sizes[size], "data", data) for size in over_data),
        *(Split(flags.get(size, size), sizes[size], "model", model) for size in "IFV"),
    ]


def fits(config: Config, batch: int, name: str, data: int, model: int) -> bool:
    return all(split.divides for split in splits(config, name, data, model, batch))


def check_sizes(config: Config, name: str, mesh: Mesh, batch: int, fixed: bool = False) -> None:
    """Every dimension that is split must divide: nothing is rounded, and nothing stays whole.

    `fixed` says that a checkpoint has decided the sizes, so that only the devices can change.
    """
    data, model = mesh.shape["data"], mesh.shape["model"]
    found = splits(config, name, data, model, batch)
    bad = [split for split in found if not split.divides]
    if not bad:
        return
    sizes = []
    for flag, size in dict.fromkeys((split.flag, split.size) for split in bad):
        ways = math.lcm(*(split.ways for split in found if split.flag == flag))
        near = [size // ways * ways, -(-size // ways) * ways]
        sizes.append(f"{flag} {either([value for value in near if value])}")
    devices = sizes_that_work(name, mesh.size, functools.partial(fits, config, batch))
    change = " and ".join(sizes)
    if not all(split.flag.startswith("--") for split in bad):
        advice = devices
    elif fixed:
        advice = f"{devices}, or begin anew, in other --checkpoints, with {change}"
    else:
        advice = f"use {change}, or {devices}"
    raise Refused(
        f"{bad[0].flag} {bad[0].size} does not divide over the {bad[0].ways} devices of the axis "
        f"`{bad[0].axis}` (mesh {data} x {model}, strategy {name}): {advice}"
    )


def sizes_that_work(name: str, count: int, fits: Fits) -> str:
    """Advice: other sizes of a mesh of so many devices, or else fewer devices."""
    sizes = [(count // model, model) for model in range(1, count + 1) if count % model == 0]
    usable = [
        f"--data {data} --model {model}"
        for data, model in sizes
        if data % slice_count() == 0
        and (model == 1 or STRATEGIES[name].model)
        and fits(name, data, model)
    ]
    if usable:
        return f"use {either(usable)}"
    return f"start it on {counts_that_work(name, count, fits)}, without --data and --model"


def counts_that_work(name: str, most: int, fits: Fits) -> str:
    counts = [count for count in range(1, most + 1) if fits(name, *default_sizes(name, count))]
    return f"{either(counts)} {'devices' if counts[1:] else 'device'}"


def either(choices: Sequence[Any]) -> str:
    """As in "1, 2 or 4"."""
    *others, last = map(str, choices or [""])
    return f"{', '.join(others)} or {last}" if others else last
