"""The Llama of the page "Bring your own weights": its files, its model, and what loads and writes it.

One letter per dimension: B batch, S position, D width, F hidden, H heads, K key-value heads, C size of
a head, V vocabulary, L layers. The weights of all layers are stacked: their first dimension is L.
"""

import json
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from orbax.checkpoint import v1 as ocp

P = jax.P

# The files

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def write_file(path, tensors):
    header = {"__metadata__": {"format": "pt"}}  # Transformers asks for it
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.tobytes())


def header_of(path):
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)  # any strings
    return header


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
OF_LAYER = {  # heads × head_dim is 128 for queries, and 32 for keys and values
    "input_layernorm": (64,),
    "self_attn.q_proj": (128, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 128),
    "post_attention_layernorm": (64,),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}


def random_tensor(random, shape):
    scale = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
    values = random.standard_normal(shape) * scale + (len(shape) == 1)
    return values.astype("float32")


def make_directory(folder):
    """Write a small Llama with random weights, in two files; return its tensors by name."""
    random = np.random.default_rng(0)
    files = {f"model-0000{number}-of-00002.safetensors": {} for number in (1, 2)}
    first, second = files.values()
    first["model.embed_tokens.weight"] = random_tensor(random, (256, 64))
    for n in range(3):
        for name, shape in OF_LAYER.items():
            part = first if n == 0 else second
            part[f"model.layers.{n}.{name}.weight"] = random_tensor(random, shape)
    second["model.norm.weight"] = random_tensor(random, (64,))
    second["lm_head.weight"] = random_tensor(random, (256, 64))
    for file, tensors in files.items():
        write_file(folder / file, tensors)
    index = {name: file for file, tensors in files.items() for name in tensors}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return first | second


# The model


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
    scaling: tuple[float, ...] | None  # of angles, since Llama 3.1
    dtype: str


def read_config(folder):
    stored = json.loads((folder / "config.json").read_text())
    if stored["architectures"] != ["LlamaForCausalLM"]:
        raise ValueError(f"this model is not a Llama: {stored['architectures']}")
    if stored.get("rope_scaling"):
        raise ValueError("scaled rotations: use read_config of examples/llama.py")
    return Config(
        V=stored["vocab_size"],
        D=stored["hidden_size"],
        F=stored["intermediate_size"],
        L=stored["num_hidden_layers"],
        H=stored["num_attention_heads"],
        K=stored["num_key_value_heads"],
        C=stored["head_dim"],
        tied=stored["tie_word_embeddings"],
        epsilon=stored["rms_norm_eps"],
        theta=stored["rope_theta"],
        scaling=None,
        dtype=stored["torch_dtype"],
    )


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


# From files to the model, and back

NAMES = [  # path in the model, name in the files with layer n, is it transposed there?
    ("embed/embedding", "model.embed_tokens.weight", False),
    ("blocks/norm_attention/scale", "model.layers.{n}.input_layernorm.weight", False),
    ("blocks/query/kernel", "model.layers.{n}.self_attn.q_proj.weight", True),
    ("blocks/key/kernel", "model.layers.{n}.self_attn.k_proj.weight", True),
    ("blocks/value/kernel", "model.layers.{n}.self_attn.v_proj.weight", True),
    ("blocks/out/kernel", "model.layers.{n}.self_attn.o_proj.weight", True),
    (
        "blocks/norm_hidden/scale",
        "model.layers.{n}.post_attention_layernorm.weight",
        False,
    ),
    ("blocks/gate/kernel", "model.layers.{n}.mlp.gate_proj.weight", True),
    ("blocks/up/kernel", "model.layers.{n}.mlp.up_proj.weight", True),
    ("blocks/down/kernel", "model.layers.{n}.mlp.down_proj.weight", True),
    ("norm/scale", "model.norm.weight", False),
    ("head/kernel", "lm_head.weight", True),  # not there if the head is tied
]


def read(folder, targets):
    """Read tensors by name, each with the shape, dtype and sharding of its target."""
    context = ocp.Context()
    context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS
    with context:
        return ocp.load(folder, targets)


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


def by_path(state):
    """Return variables by their path, such as "blocks/query/kernel"."""
    flat = nnx.to_flat_state(state)
    return {"/".join(map(str, path)): variable for path, variable in flat}


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


def tensor_of(weights, path, transposed, n):
    """Return one tensor as the files have it, on the host."""
    array = weights[path] if n is None else weights[path][n]
    return np.asarray(array).T if transposed else np.asarray(array)


def write_like(source, out, weights):
    """Write the files of `source` with the same names, in the same order."""
    layers = range(read_config(source).L)
    where = {
        name.format(n=n): (path, transposed, n if "{n}" in name else None)
        for path, name, transposed in NAMES
        for n in layers
    }
    for path in source.glob("*.safetensors"):
        names = header_of(path)
        write_file(out / path.name, {n: tensor_of(weights, *where[n]) for n in names})
    for path in source.glob("*.json"):
        (out / path.name).write_bytes(path.read_bytes())
