"""Chapter 6: its table of logical axes, with checks, and a transformer for digits (page 06a)."""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx

P = jax.P


class AxisRules:
    """A table whose fields are the names; called with names, it returns the spec."""

    def __call__(self, *names):
        rows = {**vars(self), None: None}  # a dimension without a name stays whole
        for name in names:
            if name not in rows:
                raise KeyError(f"no row for {name!r} in {names}")
        axes = [rows[name] for name in names]
        spec = P(*axes)
        used = jax.tree.leaves(axes)  # drops None, and opens tuples of axes
        for axis in used:
            if used.count(axis) > 1:
                raise ValueError(f"{axis!r} would be used twice in {spec} for {names}")
        return spec


Axis = str | tuple[str, ...] | None  # a tuple: several mesh axes together


@dataclass(frozen=True)
class Rules(AxisRules):
    """Which mesh axis shards which dimension of the model; None leaves it whole."""

    batch: Axis = None  # B, examples
    embed: Axis = None  # D, the width of the model
    hidden: Axis = None  # F, inside an MLP
    heads: Axis = None  # H, of attention
    head_size: Axis = None  # C, features of one head
    vocab: Axis = None  # V, possible answers: here digits, padded to 16


def constrain(x, rules, *names):
    """Shard an activation by the table: a name, or None, for each dimension."""
    if len(names) != x.ndim:
        raise ValueError(f"{names} for the shape {x.shape}")
    return jax.lax.with_sharding_constraint(x, rules(*names))


def mesh_of(data, model):
    """A mesh of data x model devices."""
    return jax.make_mesh(
        (data, model),
        ("data", "model"),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices()[: data * model],
    )


@dataclass(frozen=True)
class Config:
    L: int  # layers
    D: int  # model width
    F: int  # hidden width
    H: int  # heads
    C: int  # features of a head
    V: int = 16  # ten classes, padded to a number that eight devices divide
    S: int = 16  # patches of an image
    I: int = 4  # pixels of a patch
    pin: bool = True  # step_program constrains activations; False: it leaves them alone


tiny = Config(L=2, D=96, F=384, H=8, C=12)
large = Config(L=32, D=4096, F=16384, H=32, C=128)


def weight(rngs, shape, spec, inputs=1):
    """A random weight for a product that sums over its first `inputs` dimensions.

    A spec with fewer or more entries than the shape raises a ValueError.
    """
    if len(spec) != len(shape):
        raise ValueError(f"{spec} for the shape {shape}")
    size = math.prod(shape[:inputs]) ** -0.5
    return nnx.Param(size * jax.random.normal(rngs.params(), shape), out_sharding=spec)


def attend(x_BSD, w_q_DHC, w_k_DHC, w_v_DHC, w_o_HCD):
    """Self-attention: S indexes queries, T keys; w[...] is the array of a variable."""
    q_BSHC = jnp.einsum("BSD,DHC->BSHC", x_BSD, w_q_DHC[...])
    k_BTHC = jnp.einsum("BTD,DHC->BTHC", x_BSD, w_k_DHC[...])  # the same positions, as keys
    v_BTHC = jnp.einsum("BTD,DHC->BTHC", x_BSD, w_v_DHC[...])
    scores_BHST = jnp.einsum("BSHC,BTHC->BHST", q_BSHC, k_BTHC)
    a_BHST = jax.nn.softmax(scores_BHST / q_BSHC.shape[-1] ** 0.5)
    y_BSHC = jnp.einsum("BHST,BTHC->BSHC", a_BHST, v_BTHC)
    return jnp.einsum("BSHC,HCD->BSD", y_BSHC, w_o_HCD[...])


def normed(x_BSD, scale_D):
    size_BS1 = jnp.sqrt(jnp.mean(x_BSD**2, -1, keepdims=True) + 1e-6)
    return x_BSD / size_BS1 * scale_D


class Attention(nnx.Module):
    def __init__(self, config, rules, rngs):
        D, H, C = config.D, config.H, config.C
        into = rules("embed", "heads", "head_size")
        out = rules("heads", "head_size", "embed")
        self.w_q_DHC = weight(rngs, (D, H, C), into)  # queries
        self.w_k_DHC = weight(rngs, (D, H, C), into)  # keys
        self.w_v_DHC = weight(rngs, (D, H, C), into)  # values
        self.w_o_HCD = weight(rngs, (H, C, D), out, inputs=2)

    def __call__(self, x_BSD):
        return attend(x_BSD, self.w_q_DHC, self.w_k_DHC, self.w_v_DHC, self.w_o_HCD)


class MLP(nnx.Module):
    def __init__(self, config, rules, rngs):
        D, F = config.D, config.F
        self.w_DF = weight(rngs, (D, F), rules("embed", "hidden"))
        self.b_F = nnx.Param(jnp.zeros(F), out_sharding=rules("hidden"))
        self.w_FD = weight(rngs, (F, D), rules("hidden", "embed"))
        self.b_D = nnx.Param(jnp.zeros(D), out_sharding=rules("embed"))

    def __call__(self, x_BSD):
        h_BSF = jax.nn.silu(x_BSD @ self.w_DF + self.b_F)
        return h_BSF @ self.w_FD + self.b_D


class Block(nnx.Module):
    def __init__(self, config, rules, rngs):
        ones, spec = jnp.ones(config.D), rules("embed")
        self.scale_a_D = nnx.Param(ones, out_sharding=spec)  # norm before attention
        self.attention = Attention(config, rules, rngs)
        self.scale_m_D = nnx.Param(ones, out_sharding=spec)  # norm before the MLP
        self.mlp = MLP(config, rules, rngs)

    def __call__(self, x_BSD):
        x_BSD = x_BSD + self.attention(normed(x_BSD, self.scale_a_D))
        return x_BSD + self.mlp(normed(x_BSD, self.scale_m_D))


class Model(nnx.Module):
    def __init__(self, config, rules, rngs):
        self.w_ID = weight(rngs, (config.I, config.D), rules(None, "embed"))
        self.place_SD = weight(rngs, (config.S, config.D), rules(None, "embed"))
        stack = nnx.vmap(
            lambda rngs: Block(config, rules, rngs), transform_metadata={nnx.PARTITION_NAME: None}
        )
        self.blocks = stack(rngs.split(config.L))
        self.w_DV = weight(rngs, (config.D, config.V), rules("embed", "vocab"))

    def __call__(self, x_BSI):
        def layer(x_BSD, block):
            return block(x_BSD), None

        x_BSD = x_BSI @ self.w_ID + self.place_SD
        x_BSD, _ = jax.lax.scan(layer, x_BSD, self.blocks)
        return x_BSD.mean(1) @ self.w_DV


class PinnedModel(Model):
    """The model with its activations constrained: before the blocks, after each, and the logits."""

    def __init__(self, config, rules, rngs):
        super().__init__(config, rules, rngs)
        self.rules = rules

    def __call__(self, x_BSI):
        def layer(x_BSD, block):
            return constrain(block(x_BSD), self.rules, "batch", None, None), None

        x_BSD = x_BSI @ self.w_ID + self.place_SD
        x_BSD = constrain(x_BSD, self.rules, "batch", None, None)
        x_BSD, _ = jax.lax.scan(layer, x_BSD, self.blocks)
        logits_BV = x_BSD.mean(1) @ self.w_DV
        return constrain(logits_BV, self.rules, "batch", "vocab")


def make_model(config, rules):
    return PinnedModel(config, rules, nnx.Rngs(0))


def loss_of(model, batch):
    """Mean over rows; logits beyond the ten classes are masked."""
    x_BSI, labels_B = batch
    logits_BV = model(x_BSI)
    class_V = jnp.arange(logits_BV.shape[-1])
    log_p_BV = jax.nn.log_softmax(jnp.where(class_V < 10, logits_BV, -jnp.inf))
    return -jnp.where(labels_B[:, None] == class_V, log_p_BV, 0).sum(-1).mean()


momentum = optax.sgd(0.01, momentum=0.9)


def make(config, rules):
    """A new model and its optimizer."""
    model = make_model(config, rules)
    return model, nnx.Optimizer(model, momentum, wrt=nnx.Param)


def step(model, optimizer, batch):
    loss, gradients = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, gradients)
    return model, optimizer, loss


QUICK = {"xla_backend_optimization_level": 0}  # compiles faster, runs slower


def step_program(config, rules, mesh, B):
    """The step for a batch of B images, compiled from shapes and not run.

    If the config says `pin=False`, no activation is constrained.
    """

    def make_plain(config, rules):
        model = Model(config, rules, nnx.Rngs(0))
        return model, nnx.Optimizer(model, momentum, wrt=nnx.Param)

    made_by = make if config.pin else make_plain
    state = nnx.merge(*nnx.get_abstract_model(lambda: made_by(config, rules), mesh))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    by_images = jax.NamedSharding(mesh, rules("batch"))
    like = partial(jax.ShapeDtypeStruct, sharding=by_images)
    batch = like((B, config.S, config.I), "float32"), like((B,), "int32")
    with jax.set_mesh(mesh):
        jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*shardings, None))
        return jitted.lower(*state, batch).compile(QUICK)
