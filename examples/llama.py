"""A Llama-shaped language model in Flax NNX, and the names that Hugging Face gives to its weights.

One letter per dimension: B batch, S position, D width, F hidden, H heads, K key-value heads, C size of
a head, V vocabulary, L layers. The weights of all layers are stacked: their first dimension is L.
"""

import json
from dataclasses import dataclass
from functools import partial
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


def linear(size_in, size_out, spec, dtype, rngs):
    """Make a matrix without a bias, sharded by spec."""
    metadata = {"out_sharding": spec}
    options = {"use_bias": False, "param_dtype": dtype, "rngs": rngs}
    return nnx.Linear(size_in, size_out, kernel_metadata=metadata, **options)


def norm(size, epsilon, dtype, rngs):
    return nnx.RMSNorm(size, epsilon=epsilon, param_dtype=dtype, rngs=rngs)


class Block(nnx.Module):
    def __init__(self, config, rngs):
        D, F, options = config.D, config.F, {"dtype": config.dtype, "rngs": rngs}
        heads, kv_heads = config.H * config.C, config.K * config.C
        column = partial(linear, spec=("data", "model"), **options)
        row = partial(linear, spec=("model", "data"), **options)
        self.norm_attention = norm(D, config.epsilon, **options)
        self.query = column(D, heads)
        self.key = column(D, kv_heads)
        self.value = column(D, kv_heads)
        self.out = row(heads, D)
        self.norm_hidden = norm(D, config.epsilon, **options)
        self.gate = column(D, F)
        self.up = column(D, F)
        self.down = row(F, D)
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
    def __init__(self, config, rngs):
        D, V, options = config.D, config.V, {"dtype": config.dtype, "rngs": rngs}
        metadata = {"out_sharding": ("model", "data")}
        self.embed = nnx.Embed(
            V, D, param_dtype=config.dtype, embedding_metadata=metadata, rngs=rngs
        )
        self.blocks = nnx.vmap(
            lambda rngs: Block(config, rngs),
            transform_metadata={nnx.PARTITION_NAME: None},
        )(rngs.split(config.L))
        self.norm = norm(D, config.epsilon, **options)
        head = partial(linear, spec=("data", "model"), **options)
        self.head = None if config.tied else head(D, V)

    def __call__(self, tokens_BS):
        """Return logits, (B, S, V)."""
        x_BSD = jax.lax.with_sharding_constraint(self.embed(tokens_BS), P("data"))
        x_BSD, _ = jax.lax.scan(lambda x, block: (block(x), None), x_BSD, self.blocks)
        y_BSD = self.norm(x_BSD)
        logits_BSV = self.head(y_BSD) if self.head else self.embed.attend(y_BSD)
        return jax.lax.with_sharding_constraint(logits_BSV, P("data", None, "model"))


# ---- its weights ------------------------------------------------------------------------------

LAYER = "model.layers.{n}."  # n is the number of the layer
NAMES = [  # path in the model, name in the files, is it transposed there?
    ("embed/embedding", "model.embed_tokens.weight", False),
    ("blocks/norm_attention/scale", LAYER + "input_layernorm.weight", False),
    ("blocks/query/kernel", LAYER + "self_attn.q_proj.weight", True),
    ("blocks/key/kernel", LAYER + "self_attn.k_proj.weight", True),
    ("blocks/value/kernel", LAYER + "self_attn.v_proj.weight", True),
    ("blocks/out/kernel", LAYER + "self_attn.o_proj.weight", True),
    ("blocks/norm_hidden/scale", LAYER + "post_attention_layernorm.weight", False),
    ("blocks/gate/kernel", LAYER + "mlp.gate_proj.weight", True),
    ("blocks/up/kernel", LAYER + "mlp.up_proj.weight", True),
    ("blocks/down/kernel", LAYER + "mlp.down_proj.weight", True),
    ("norm/scale", "model.norm.weight", False),
    ("head/kernel", "lm_head.weight", True),  # not there if the head is tied
]


def by_path(state):
    """Return variables by their path, such as "blocks/query/kernel"."""
    flat = nnx.to_flat_state(state)
    return {"/".join(map(str, path)): variable for path, variable in flat}


def read_tensor(read, name, weight, transposed):
    """Read one tensor, and transpose it if it is transposed in the file."""
    if not transposed:
        return read({name: weight})[name]
    inputs, outputs = (*weight.sharding.spec, None, None)[:2]  # Nones may be left out
    sharding = jax.NamedSharding(weight.sharding.mesh, P(outputs, inputs))
    shape = weight.shape[::-1]
    target = jax.ShapeDtypeStruct(shape, weight.dtype, sharding=sharding)
    transpose = jax.jit(jnp.transpose, out_shardings=weight.sharding)
    return transpose(read({name: target})[name])


def read_stack(read, name, weight, transposed):
    """Read the tensors of a stacked weight, and put each into its place."""
    mesh, spec = weight.sharding.mesh, weight.sharding.spec
    sharding = jax.NamedSharding(mesh, P(*spec[1:]))  # without the layers
    layer = jax.ShapeDtypeStruct(weight.shape[1:], weight.dtype, sharding=sharding)

    def put(stack, tensor, n):
        return stack.at[n].set(tensor)

    on_devices = {"out_shardings": weight.sharding}
    put_in_place = jax.jit(put, donate_argnums=0, **on_devices)
    stack = jax.jit(lambda: jnp.zeros(weight.shape, weight.dtype), **on_devices)()
    for n in range(weight.shape[0]):
        tensor = read_tensor(read, name.format(n=n), layer, transposed)
        stack = put_in_place(stack, tensor, n)
    return stack


def load(read, config, mesh):
    """Load a model; `read` takes a target for each name, and returns the tensors."""

    def make():
        return Llama(config, nnx.Rngs(0))

    with jax.set_mesh(mesh):
        graphdef, state = nnx.get_abstract_model(make, mesh)
    weights = by_path(state)
    for path, name, transposed in NAMES:
        if path in weights:
            weight = weights[path].get_value()  # a shape, a dtype and a sharding
            read_weight = read_stack if "{n}" in name else read_tensor
            weights[path].set_value(read_weight(read, name, weight, transposed))
    return nnx.merge(graphdef, state)


def adapter_of(layer, rank, seed):
    """Make adapters for a stack of matrices, sharded like its rows and its columns."""
    # A spec may leave out Nones at its end
    layers, rows, columns = (*layer.kernel.sharding.spec, None, None, None)[:3]

    def make(rngs):
        return nnx.LoRA(
            layer.in_features,
            rank,
            layer.out_features,
            dtype=layer.kernel.dtype,  # of the arithmetic; A and B are float32
            a_metadata={"out_sharding": (rows, None)},
            b_metadata={"out_sharding": (None, columns)},
            rngs=rngs,
        )

    make_stack = nnx.vmap(make, transform_metadata={nnx.PARTITION_NAME: layers})
    return make_stack(nnx.Rngs(seed).split(layer.kernel.shape[0]))


def add_adapters(model, rank):
    """Wrap each matrix of the blocks in `nnx.LoRA`."""
    for seed, (name, layer) in enumerate(list(nnx.iter_children(model.blocks))):
        if isinstance(layer, nnx.Linear):
            adapter = jax.jit(partial(adapter_of, layer, rank, seed))()
            adapter.base_module = nnx.data(layer)  # it was made without one
            setattr(model.blocks, name, adapter)


def merged(model):
    """Return the weights by path, each with the product of its adapters added."""
    weights = {path: w[...] for path, w in by_path(nnx.state(model, nnx.Param)).items()}

    def add(kernel, a, b):  # for all layers; the sum is in float32
        return (kernel + a @ b).astype(kernel.dtype)

    for path in [path for path in weights if path.endswith("/lora_a")]:
        layer = path.removesuffix("/lora_a")
        a, b = weights.pop(f"{layer}/lora_a"), weights.pop(f"{layer}/lora_b")
        kernel = weights.pop(f"{layer}/base_module/kernel")
        add_here = jax.jit(add, out_shardings=kernel.sharding)
        weights[f"{layer}/kernel"] = add_here(kernel, a, b)
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
