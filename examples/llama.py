"""A Llama-shaped language model in Flax NNX, and the names that Hugging Face gives to its weights.

One letter per dimension: B batch, S position, D width, F hidden, H heads, K key-value heads, C size of
a head, V vocabulary, L layers. The weights of all layers are stacked: their first dimension is L.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from safetensors_io import BadWeights

P = jax.P


@dataclass(frozen=True)
class Config:
    """The sizes of a model, and what its configuration says about the arithmetic."""

    V: int
    D: int
    F: int
    L: int
    H: int
    K: int
    C: int
    tied: bool  # the head is the embedding
    epsilon: float  # of the norms
    theta: float  # of the rotary embedding
    scaling: tuple[float, ...] | None  # of it, the values of SCALING; since Llama 3.1
    dtype: str


KEYS = {  # in config.json
    "V": "vocab_size",
    "D": "hidden_size",
    "F": "intermediate_size",
    "L": "num_hidden_layers",
    "H": "num_attention_heads",
}
SCALING = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


def read_config(folder: Path) -> Config:
    """Return the configuration of a Llama model. Raises BadWeights for what this model is not."""
    path = folder / "config.json"
    try:
        stored = json.loads(path.read_bytes())
        architectures = stored.get("architectures")
    except FileNotFoundError as error:
        raise BadWeights(f"{path} is missing: is {folder} a model's directory?") from error
    except (ValueError, AttributeError) as error:
        raise BadWeights(f"{path} is not a JSON object: download it again") from error
    if architectures != ["LlamaForCausalLM"]:
        raise BadWeights(
            f"{path} says {architectures}, and this program knows LlamaForCausalLM alone: write "
            "the model, and its table of names, as in llama.py"
        )
    rope = stored.get("rope_parameters") or stored.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    unknown = {
        "hidden_act": stored.get("hidden_act", "silu") != "silu",
        "attention_bias": stored.get("attention_bias", False),
        "mlp_bias": stored.get("mlp_bias", False),
        "quantization_config": stored.get("quantization_config"),
        f"rope_type {kind}": kind not in ("default", "llama3"),
    }
    for key, given in unknown.items():
        if given:
            raise BadWeights(f"{path} asks for {key}, which the model in llama.py does not have")
    try:
        sizes = {letter: int(stored[key]) for letter, key in KEYS.items()}
        D, H = sizes["D"], sizes["H"]
        return Config(
            **sizes,
            K=int(stored.get("num_key_value_heads") or H),
            C=int(stored.get("head_dim") or D // H),
            tied=bool(stored.get("tie_word_embeddings", False)),
            epsilon=float(stored.get("rms_norm_eps", 1e-6)),
            theta=float(rope.get("rope_theta", stored.get("rope_theta", 10_000))),
            scaling=tuple(float(rope[key]) for key in SCALING) if kind == "llama3" else None,
            dtype=jnp.dtype(stored.get("dtype") or stored["torch_dtype"]).name,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadWeights(f"{path} lacks something or has it in another form: {error}") from error


# ---- the model --------------------------------------------------------------------------------


def frequencies(config):
    """Return how far each pair of features turns per position, in radians: (C/2,)."""
    turn = config.theta ** (-np.arange(0, config.C, 2) / config.C)
    if config.scaling is None:
        return turn
    # Llama 3.1 slows down what turns less than `low` times in the original context,
    # keeps what turns more than `high` times, and blends in between.
    factor, low, high, context = config.scaling
    keep = np.clip((context * turn / (2 * np.pi) - low) / (high - low), 0, 1)
    return turn * (keep + (1 - keep) / factor)


def rotate(x_BSHC, turn):
    """Turn the features c and c + C/2 of each head by an angle that grows with S."""
    angle_SC = jnp.arange(x_BSHC.shape[1])[:, None] * jnp.asarray(turn, jnp.float32)
    cos, sin = jnp.cos(angle_SC)[:, None], jnp.sin(angle_SC)[:, None]
    left, right = jnp.split(x_BSHC.astype(jnp.float32), 2, axis=-1)
    turned = [left * cos - right * sin, right * cos + left * sin]
    return jnp.concatenate(turned, axis=-1).astype(x_BSHC.dtype)


def linear(size_in, size_out, spec, rank, dtype, rngs):
    """Make a matrix, sharded by spec; with a rank, also two adapters, sharded alike."""
    options = {
        "use_bias": False,
        "param_dtype": dtype,
        "kernel_metadata": {"out_sharding": spec},
        "rngs": rngs,
    }
    if rank == 0:
        return nnx.Linear(size_in, size_out, **options)
    return nnx.LoRALinear(
        size_in,
        size_out,
        lora_rank=rank,
        lora_dtype=dtype,  # of the arithmetic; the adapters are kept in float32
        a_metadata={"out_sharding": (spec[0], None)},
        b_metadata={"out_sharding": (None, spec[1])},
        **options,
    )


class Block(nnx.Module):
    def __init__(self, config, rank, rngs):
        D, F, dtype = config.D, config.F, config.dtype
        heads, kv_heads = config.H * config.C, config.K * config.C
        norm = {"epsilon": config.epsilon, "param_dtype": dtype, "rngs": rngs}
        column, row = ("data", "model"), ("model", "data")
        rest = (rank, dtype, rngs)
        self.norm_attention = nnx.RMSNorm(D, **norm)
        self.query = linear(D, heads, column, *rest)
        self.key = linear(D, kv_heads, column, *rest)
        self.value = linear(D, kv_heads, column, *rest)
        self.out = linear(heads, D, row, *rest)
        self.norm_hidden = nnx.RMSNorm(D, **norm)
        self.gate = linear(D, F, column, *rest)
        self.up = linear(D, F, column, *rest)
        self.down = linear(F, D, row, *rest)
        self.config = config

    def __call__(self, x_BSD):
        y_BSD, turn = self.norm_attention(x_BSD), frequencies(self.config)
        B, S, _ = x_BSD.shape
        q_BSHC = rotate(self.query(y_BSD).reshape(B, S, -1, self.config.C), turn)
        k_BSKC = rotate(self.key(y_BSD).reshape(B, S, -1, self.config.C), turn)
        v_BSKC = self.value(y_BSD).reshape(B, S, -1, self.config.C)
        mixed = jax.nn.dot_product_attention(q_BSHC, k_BSKC, v_BSKC, is_causal=True)
        x_BSD += self.out(mixed.reshape(B, S, -1))
        y_BSD = self.norm_hidden(x_BSD)
        x_BSD += self.down(jax.nn.silu(self.gate(y_BSD)) * self.up(y_BSD))
        return jax.lax.with_sharding_constraint(x_BSD, P("data"))


class Llama(nnx.Module):
    def __init__(self, config, rank, rngs):
        D, V, dtype = config.D, config.V, config.dtype
        sharded = {"embedding_metadata": {"out_sharding": ("model", "data")}}
        self.embed = nnx.Embed(V, D, param_dtype=dtype, rngs=rngs, **sharded)
        self.blocks = nnx.vmap(
            lambda rngs: Block(config, rank, rngs),
            transform_metadata={nnx.PARTITION_NAME: None},
        )(rngs.split(config.L))
        self.norm = nnx.RMSNorm(D, epsilon=config.epsilon, param_dtype=dtype, rngs=rngs)
        untied = ("data", "model"), 0, dtype, rngs  # sharding, rank
        self.head = None if config.tied else linear(D, V, *untied)

    def __call__(self, tokens_BS):
        """Return logits, (B, S, V)."""
        x_BSD = jax.lax.with_sharding_constraint(self.embed(tokens_BS), P("data"))
        x_BSD, _ = jax.lax.scan(lambda x, block: (block(x), None), x_BSD, self.blocks)
        y_BSD = self.norm(x_BSD)
        return self.embed.attend(y_BSD) if self.head is None else self.head(y_BSD)


# ---- its weights ------------------------------------------------------------------------------

NAMES = [  # path in the model, name in the files with layer n, is it transposed there?
    ("embed/embedding", "model.embed_tokens.weight", False),
    ("blocks/norm_attention/scale", "model.layers.{n}.input_layernorm.weight", False),
    ("blocks/query/kernel", "model.layers.{n}.self_attn.q_proj.weight", True),
    ("blocks/key/kernel", "model.layers.{n}.self_attn.k_proj.weight", True),
    ("blocks/value/kernel", "model.layers.{n}.self_attn.v_proj.weight", True),
    ("blocks/out/kernel", "model.layers.{n}.self_attn.o_proj.weight", True),
    ("blocks/norm_hidden/scale", "model.layers.{n}.post_attention_layernorm.weight", False),
    ("blocks/gate/kernel", "model.layers.{n}.mlp.gate_proj.weight", True),
    ("blocks/up/kernel", "model.layers.{n}.mlp.up_proj.weight", True),
    ("blocks/down/kernel", "model.layers.{n}.mlp.down_proj.weight", True),
    ("norm/scale", "model.norm.weight", False),
    ("head/kernel", "lm_head.weight", True),  # not there if the head is tied
]


def by_path(state):
    """Return variables by their path, such as "blocks/query/kernel"."""
    flat = nnx.to_flat_state(state)
    return {"/".join(map(str, path)): variable for path, variable in flat}


def load_weight(read, name, target, transposed):
    """Read one weight, a tensor at a time, and put each into place on the devices."""
    spec = (*target.sharding.spec, None, None, None)[: target.ndim]
    stacked = "{n}" in name
    shape, spec = (target.shape[1:], spec[1:]) if stacked else (target.shape, spec)
    if transposed:
        shape, spec = shape[::-1], spec[::-1]
    in_file = jax.NamedSharding(target.sharding.mesh, P(*spec))
    wanted = jax.ShapeDtypeStruct(shape, target.dtype, sharding=in_file)

    def put(weight, tensor, n):
        tensor = tensor.T if transposed else tensor
        return weight.at[n].set(tensor) if stacked else tensor

    into = {"out_shardings": target.sharding}
    weight = jax.jit(lambda: jnp.zeros(target.shape, target.dtype), **into)()
    put = jax.jit(put, donate_argnums=0, **into)
    for n in range(target.shape[0] if stacked else 1):
        file_name = name.format(n=n)
        weight = put(weight, read({file_name: wanted})[file_name], n)
    return weight


def load(read, config, mesh, rank=0):
    """Load a model; with a rank, also make its adapters.

    `read` takes a dictionary from names to shapes, each with a dtype and a sharding.
    """

    def make():
        return Llama(config, rank, nnx.Rngs(0))

    with jax.set_mesh(mesh):
        graphdef, state = nnx.get_abstract_model(make, mesh)
        adapters = by_path(jax.jit(lambda: nnx.state(make(), nnx.LoRAParam))())
    weights = by_path(state)
    for path, name, transposed in NAMES:
        if path in weights:
            array = load_weight(read, name, weights[path], transposed)
            weights[path].set_value(array)
    for path, adapter in adapters.items():
        weights[path].set_value(adapter[...])
    return nnx.merge(graphdef, state)


def merged(model):
    """Return the weights by path, each with the product of its adapters added."""
    weights = {path: w[...] for path, w in by_path(nnx.state(model, nnx.Param)).items()}

    def add(kernel, a, b):
        update = jnp.einsum("lir,lro->lio", a, b)
        return (kernel.astype(update.dtype) + update).astype(kernel.dtype)

    for path in [path for path in weights if path.endswith("/lora_a")]:
        kernel = path.replace("lora/lora_a", "kernel")
        a, b = weights.pop(path), weights.pop(path.replace("lora_a", "lora_b"))
        compiled = jax.jit(add, out_shardings=weights[kernel].sharding)
        weights[kernel] = compiled(weights[kernel], a, b)
    return weights


def check_names(names, config):
    """Raise BadWeights if the files have a tensor that the model lacks, or lack the head."""
    expected = {name.format(n=n) for _, name, _ in NAMES for n in range(config.L)}
    if config.tied:
        expected.remove("lm_head.weight")
    elif "lm_head.weight" not in names:
        raise BadWeights(
            "lm_head.weight is missing, and tie_word_embeddings in config.json is not true: "
            "if this model has a tied head, set it"
        )
    for name in sorted(set(names) - expected):
        if not name.endswith("rotary_emb.inv_freq"):  # old files have it; it is computed here
            raise BadWeights(
                f"{name} is in the files, but not a weight of the model in config.json"
            )
