# @title The model around it: sizes, blocks of attention and MLP, the loss
import math

auto = (jax.sharding.AxisType.Auto,) * 2

def mesh_of(data, model):
    """A mesh of data x model devices."""
    return jax.make_mesh((data, model), ("data", "model"), axis_types=auto,
                         devices=jax.devices()[:data * model])

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
    pin: bool = True  # constrain activations; False leaves them to the compiler

tiny = Config(L=2, D=96, F=384, H=8, C=12)
large = Config(L=32, D=4096, F=16384, H=32, C=128)

def weight(rngs, shape, spec, inputs=1):
    """A random weight; its first `inputs` dimensions are the ones that are summed."""
    if len(spec) != len(shape):
        raise ValueError(f"{spec} for the shape {shape}")
    size = math.prod(shape[:inputs]) ** -0.5
    return nnx.Param(size * jax.random.normal(rngs.params(), shape), out_sharding=spec)

def attend(x_BSD, w_q_DHC, w_k_DHC, w_v_DHC, w_o_HCD):
    """S counts the patches that ask, T those that answer."""
    q_BSHC = jnp.einsum("BSD,DHC->BSHC", x_BSD, w_q_DHC[...])
    k_BTHC = jnp.einsum("BTD,DHC->BTHC", x_BSD, w_k_DHC[...])  # the same x
    v_BTHC = jnp.einsum("BTD,DHC->BTHC", x_BSD, w_v_DHC[...])
    scores_BHST = jnp.einsum("BSHC,BTHC->BHST", q_BSHC, k_BTHC)
    a_BHST = jax.nn.softmax(scores_BHST / q_BSHC.shape[-1] ** 0.5)
    y_BSHC = jnp.einsum("BHST,BTHC->BSHC", a_BHST, v_BTHC)
    return jnp.einsum("BSHC,HCD->BSD", y_BSHC, w_o_HCD[...])

def normed(x_BSD, scale_D):
    size_BS1 = jnp.sqrt(jnp.mean(x_BSD**2, -1, keepdims=True) + 1e-6)
    return x_BSD / size_BS1 * scale_D

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
        self.scale_a_D = nnx.Param(ones, out_sharding=spec)
        self.attention = Attention(config, rules, rngs)
        self.scale_m_D = nnx.Param(ones, out_sharding=spec)
        self.mlp = MLP(config, rules, rngs)

    def __call__(self, x_BSD):
        x_BSD = x_BSD + self.attention(normed(x_BSD, self.scale_a_D))
        return x_BSD + self.mlp(normed(x_BSD, self.scale_m_D))

class Model(nnx.Module):
    def __init__(self, config, rules, rngs):
        self.w_ID = weight(rngs, (config.I, config.D), rules(None, "embed"))
        self.place_SD = weight(rngs, (config.S, config.D), rules(None, "embed"))
        stack = nnx.vmap(lambda rngs: Block(config, rules, rngs),
                         transform_metadata={nnx.PARTITION_NAME: None})
        self.blocks = stack(rngs.split(config.L))
        self.w_DV = weight(rngs, (config.D, config.V), rules("embed", "vocab"))
        self.rules, self.pin = rules, config.pin

    def __call__(self, x_BSI):
        def pinned(x, *names):
            return constrain(x, self.rules, *names) if self.pin else x
        def layer(x_BSD, block):
            return pinned(block(x_BSD), "batch", None, None), None
        x_BSD = pinned(x_BSI @ self.w_ID + self.place_SD, "batch", None, None)
        x_BSD, _ = jax.lax.scan(layer, x_BSD, self.blocks)
        return pinned(x_BSD.mean(1) @ self.w_DV, "batch", "vocab")

def make_model(config, rules):
    return Model(config, rules, nnx.Rngs(0))

def loss_of(model, batch):
    """Mean over rows; logits beyond the ten classes are masked, as in chapter 4."""
    x_BSI, labels_B = batch
    logits_BV = model(x_BSI)
    class_V = jnp.arange(logits_BV.shape[-1])
    log_p_BV = jax.nn.log_softmax(jnp.where(class_V < 10, logits_BV, -jnp.inf))
    return -jnp.where(labels_B[:, None] == class_V, log_p_BV, 0).sum(-1).mean()
