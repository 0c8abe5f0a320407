"""A Llama forward pass in NumPy, from the published formulas, and a small directory to run it on.

It shares no code with examples/llama.py. Names, shapes and the order of features in a head are those
of https://github.com/huggingface/transformers/blob/main/src/transformers/models/llama.
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

SMALL = {  # config.json; every size is another, so that no two can be taken for each other
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA3 = {  # of Llama 3.2 (https://huggingface.co/meta-llama/Llama-3.2-1B), for a short context
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
NAMES_OF_DTYPES = {"bfloat16": "BF16", "float32": "F32"}


def layout(config):
    """The public layout: the name and shape of every tensor."""
    D, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    C = config.get("head_dim") or D // config["num_attention_heads"]
    heads, kv_heads = config["num_attention_heads"] * C, config["num_key_value_heads"] * C
    shapes = {"model.embed_tokens.weight": (V, D)}
    for n in range(config["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{n}.input_layernorm.weight": (D,),
            f"model.layers.{n}.mlp.down_proj.weight": (D, F),
            f"model.layers.{n}.mlp.gate_proj.weight": (F, D),
            f"model.layers.{n}.mlp.up_proj.weight": (F, D),
            f"model.layers.{n}.post_attention_layernorm.weight": (D,),
            f"model.layers.{n}.self_attn.k_proj.weight": (kv_heads, D),
            f"model.layers.{n}.self_attn.o_proj.weight": (D, heads),
            f"model.layers.{n}.self_attn.q_proj.weight": (heads, D),
            f"model.layers.{n}.self_attn.v_proj.weight": (kv_heads, D),
        }
    shapes["model.norm.weight"] = (D,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, D)
    return shapes


def random_tensors(config, seed=0):
    random = np.random.default_rng(seed)
    dtype = np.dtype(getattr(ml_dtypes, config["torch_dtype"], config["torch_dtype"]))
    tensors = {}
    for name, shape in layout(config).items():
        scale = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
        values = random.standard_normal(shape, dtype="float32") * scale + (len(shape) == 1)
        tensors[name] = values.astype(dtype)
    return tensors


def write(path, tensors):
    """Write one file, byte by byte as the format is documented."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in tensors.items():
        kind = NAMES_OF_DTYPES.get(tensor.dtype.name, tensor.dtype.name)
        ends = [len(data), len(data) + tensor.nbytes]
        header[name] = {"dtype": kind, "shape": tensor.shape, "data_offsets": ends}
        data += tensor.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + data)


def read(path):
    """Return the tensors of one file."""
    data = Path(path).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    kinds = {"BF16": ml_dtypes.bfloat16, "F32": np.float32}
    return {
        name: np.frombuffer(
            data[start + info["data_offsets"][0] : start + info["data_offsets"][1]],
            kinds[info["dtype"]],
        ).reshape(info["shape"])
        for name, info in header.items()
    }


def read_all(folder):
    return {
        k: v for path in sorted(Path(folder).glob("*.safetensors")) for k, v in read(path).items()
    }


def make(folder, files=2, **changes):
    """Write a small model in so many files. Return its configuration and its tensors."""
    config = SMALL | changes
    tensors = random_tensors(config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if files == 1:
        write(folder / "model.safetensors", tensors)
        return config, tensors
    names, listed = list(tensors), {}
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        mine = names[number * len(names) // files : (number + 1) * len(names) // files]
        write(folder / file, {name: tensors[name] for name in mine})
        listed |= dict.fromkeys(mine, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": listed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return config, tensors


def frequencies(config):
    """Radians per position, as Transformers computes them: by wavelength."""
    C = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    slow = config["rope_theta"] ** (-np.arange(0, C, 2) / C)
    if not config["rope_scaling"]:
        return slow
    scaling, result = config["rope_scaling"], []
    old = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    for frequency in slow:
        wavelength = 2 * np.pi / frequency
        if wavelength < old / high:
            result.append(frequency)
        elif wavelength > old / low:
            result.append(frequency / scaling["factor"])
        else:
            smooth = (old / wavelength - low) / (high - low)
            result.append((1 - smooth) * frequency / scaling["factor"] + smooth * frequency)
    return np.array(result)


def forward(config, tensors, tokens):
    """Logits, (batch, position, vocabulary), in float64."""
    weights = {name: tensor.astype("float64") for name, tensor in tensors.items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    batch, length = tokens.shape
    angles = np.arange(length)[:, None] * frequencies(config)

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weights[name]

    def turned(x):
        """Features c and c + C/2 are the real and the imaginary part of a number."""
        real, imaginary = np.split(x, 2, axis=-1)
        z = (real + 1j * imaginary) * np.exp(1j * angles)[:, None]
        return np.concatenate([z.real, z.imag], axis=-1)

    x = weights["model.embed_tokens.weight"][tokens]
    for n in range(config["num_hidden_layers"]):
        at = f"model.layers.{n}."

        def product(x, name, at=at):
            return x @ weights[f"{at}{name}.weight"].T

        y = norm(x, at + "input_layernorm.weight")
        q = turned(product(y, "self_attn.q_proj").reshape(batch, length, heads, -1))
        k = turned(product(y, "self_attn.k_proj").reshape(batch, length, kv_heads, -1))
        v = product(y, "self_attn.v_proj").reshape(batch, length, kv_heads, -1)
        mixed = np.empty_like(q)
        for h in range(heads):
            g = h * kv_heads // heads  # the key-value head that this head shares
            scores = np.einsum("bqc,bkc->bqk", q[:, :, h], k[:, :, g]) / np.sqrt(q.shape[-1])
            scores[:, ~np.tri(length, dtype=bool)] = -np.inf
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            mixed[:, :, h] = (shares / shares.sum(-1, keepdims=True)) @ v[:, :, g]
        x = x + product(mixed.reshape(batch, length, -1), "self_attn.o_proj")
        y = norm(x, at + "post_attention_layernorm.weight")
        gate = product(y, "mlp.gate_proj")
        x = x + product(gate / (1 + np.exp(-gate)) * product(y, "mlp.up_proj"), "mlp.down_proj")
    head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    return norm(x, "model.norm.weight") @ weights[f"{head}.weight"].T
