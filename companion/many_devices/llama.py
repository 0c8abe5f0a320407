"""The Llama of the page "Bring your own weights": its files, its model, and what loads and writes it.

One letter per dimension: B batch, S position, D width, F hidden, H heads, K key-value heads, C size of
a head, V vocabulary, L layers. The weights of all layers are stacked: their first dimension is L.
"""

import inspect
import json
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
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
        dtype=stored["torch_dtype"],
    )


def frequencies(config):
    """Return how far each pair of features turns per position, in radians: (C/2,)."""
    return config.theta ** (-np.arange(0, config.C, 2) / config.C)


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


# A reference in NumPy, which shares no code with the model


def attention_in_numpy(q_BSHC, k_BSKC, v_BSKC, theta):
    """Rotate queries and keys, and mix the values that each position may see."""
    _, S, H, C = q_BSHC.shape
    angle_SC = np.arange(S)[:, None] * theta ** (-np.arange(0, C, 2) / C)

    def rotated(x_BSHC):
        """Features c and c + C/2 are the real and the imaginary part of a number."""
        real, imaginary = np.split(x_BSHC, 2, axis=-1)
        z = (real + 1j * imaginary) * np.exp(1j * angle_SC)[:, None]
        return np.concatenate([z.real, z.imag], axis=-1)

    share = H // k_BSKC.shape[2]  # query heads to a key-value head
    k_BSHC = np.repeat(rotated(k_BSKC), share, axis=2)
    v_BSHC = np.repeat(v_BSKC, share, axis=2)
    scores_BHST = np.einsum("BSHC,BTHC->BHST", rotated(q_BSHC), k_BSHC) / np.sqrt(C)
    scores_BHST[..., ~np.tri(S, dtype=bool)] = -np.inf
    shares_BHST = np.exp(scores_BHST - scores_BHST.max(-1, keepdims=True))
    shares_BHST /= shares_BHST.sum(-1, keepdims=True)
    return np.einsum("BHST,BTHC->BSHC", shares_BHST, v_BSHC)


def logits_in_numpy(tensors, tokens_BS, config):
    """Return logits, (B, S, V), of tensors by their names in the files."""
    B, S = tokens_BS.shape

    def normed(x_BSD, name):
        mean_BS1 = (x_BSD**2).mean(-1, keepdims=True)
        return x_BSD / np.sqrt(mean_BS1 + config.epsilon) * tensors[f"{name}.weight"]

    def product(x, name):
        return x @ tensors[f"{name}.weight"].T

    x_BSD = tensors["model.embed_tokens.weight"][tokens_BS]
    for n in range(config.L):
        at = f"model.layers.{n}"
        y_BSD = normed(x_BSD, f"{at}.input_layernorm")
        qkv = [product(y_BSD, f"{at}.self_attn.{part}_proj") for part in "qkv"]
        heads = [x.reshape(B, S, -1, config.C) for x in qkv]
        mixed = attention_in_numpy(*heads, config.theta).reshape(B, S, -1)
        x_BSD = x_BSD + product(mixed, f"{at}.self_attn.o_proj")
        y_BSD = normed(x_BSD, f"{at}.post_attention_layernorm")
        gate_BSF = product(y_BSD, f"{at}.mlp.gate_proj")
        silu_BSF = gate_BSF / (1 + np.exp(-gate_BSF))
        up_BSF = product(y_BSD, f"{at}.mlp.up_proj")
        x_BSD = x_BSD + product(silu_BSF * up_BSF, f"{at}.mlp.down_proj")
    return product(normed(x_BSD, "model.norm"), "lm_head")


# From files to the model, and back

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


def read(folder, targets):
    """Read tensors by name, each with the shape, dtype and sharding of its target."""
    context = ocp.Context()
    context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS
    with context:
        return ocp.load(folder, targets)


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


def by_path(state):
    """Return variables by their path, such as "blocks/query/kernel"."""
    flat = nnx.to_flat_state(state)
    return {"/".join(map(str, path)): variable for path, variable in flat}


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


def tensor_of(weights, path, transposed, n):
    """Return one tensor as the files have it, on the host."""
    array = weights[path] if n is None else weights[path][n]
    return np.asarray(array).T if transposed else np.asarray(array)


def write_like(source, out, weights, names=NAMES):
    """Write the files of `source` with the same names, in the same order; in one process."""
    layers = range(read_config(source).L)
    where = {
        name.format(n=n): (path, transposed, n if "{n}" in name else None)
        for path, name, transposed in names
        for n in layers
    }
    for path in source.glob("*.safetensors"):
        tensors = {name: tensor_of(weights, *where[name]) for name in header_of(path)}
        write_file(out / path.name, tensors)
    for path in source.glob("*.json"):
        (out / path.name).write_bytes(path.read_bytes())


# What the page "Fine-tune with LoRA" trains on

TEXT = inspect.getsource(nnx.MultiHeadAttention).encode()
TOKENS = np.frombuffer(TEXT, np.uint8).astype("int32")


def batch_of(number, mesh, size=16, length=33):
    """Return the tokens of one step, (size, length), the same on every mesh."""
    begins = np.random.default_rng(number).integers(len(TOKENS) - length, size=size)
    tokens_BS = np.stack([TOKENS[begin : begin + length] for begin in begins])
    return jax.device_put(tokens_BS, jax.NamedSharding(mesh, P("data")))


def loss_of(model, tokens_BS):
    """Return the mean cross entropy of the next token."""
    logits_BSV = model(tokens_BS[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BSV, tokens_BS[:, 1:]).mean()
