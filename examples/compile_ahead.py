"""Compile a training step for a machine that is not here: does it fit, what is sent, what overlaps?

    python examples/compile_ahead.py v5e:4x4 --data 16
    python examples/compile_ahead.py v5e:4x4 --data 16 --offload layer_input
    python examples/compile_ahead.py v5p:8x16x16 --replica 8 --data 256
    python examples/compile_ahead.py h100:64 --data 8 --model 8

The machine is a slice of TPUs by its grid of chips, or a number of H100s, eight in each node. Nothing
is allocated and nothing runs. The compilers are libtpu, or jax-cuda13-plugin and jax-cuda13-pjrt;
`--without-compiler` says what can be said without one: state, traffic by a formula, matmuls and
moves to the host in the lowered program. The exit status is 0 if the step fits, 1 if it does not.

To ask for your own step, replace what is between the two lines. Names end in their dimensions: B
sequences, S length (T where it is attended to), D model, F hidden, H heads, K kv heads, C head size,
V vocabulary, L layers.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # or libtpu looks for a TPU in this machine
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import topologies

import meshscope as ms

P = jax.P

# ------------------------------------------------------------------------------- the step


class Config(NamedTuple):
    """Sizes of Llama 3.1 8B."""

    L: int = 32
    D: int = 4096
    F: int = 14336
    H: int = 32
    K: int = 8
    C: int = 128
    V: int = 128256
    dtype: str = "bfloat16"  # of activations and of gathered weights


def weights_of(config: Config) -> dict[str, tuple[tuple[int, ...], P]]:
    """Shape and spec of each float32 weight, by name."""
    L, D, F, H, K, C, V, _ = config
    return {
        "embed_VD": ((V, D), P(None, "data")),
        "q_LDHC": ((L, D, H, C), P(None, "data", "model")),
        "k_LDKC": ((L, D, K, C), P(None, "data", "model")),
        "v_LDKC": ((L, D, K, C), P(None, "data", "model")),
        "o_LHCD": ((L, H, C, D), P(None, "model", None, "data")),
        "gate_LDF": ((L, D, F), P(None, "data", "model")),
        "up_LDF": ((L, D, F), P(None, "data", "model")),
        "down_LFD": ((L, F, D), P(None, "model", "data")),
        "norm1_LD": ((L, D), P()),
        "norm2_LD": ((L, D), P()),
        "norm_D": ((D,), P()),
        "head_DV": ((D, V), P("data", "model")),
    }


def normed(x_BSD, scale_D):
    """RMSNorm, computed in float32."""
    mean_BS1 = jnp.mean(x_BSD.astype("float32") ** 2, axis=-1, keepdims=True)
    return (x_BSD * jax.lax.rsqrt(mean_BS1 + 1e-5) * scale_D).astype(x_BSD.dtype)


def gather_as(dtype, shard, axis=0):
    """Return the weight, whole along `data`, in `dtype`; its gradient comes back as a shard."""
    shard = jax.lax.pcast(shard.astype(dtype), "replica", to="varying")
    return jax.lax.all_gather(shard, "data", axis=axis, tiled=True)


def layer(x_BSD, w):
    """Compute one layer for the sequences, heads and hidden features of one device."""
    x_BSD = checkpoint_name(x_BSD, "layer_input")
    gather = partial(gather_as, x_BSD.dtype)

    # attention, with the heads of this device
    h_BSD = normed(x_BSD, w["norm1_LD"])
    q_BSHC = jnp.einsum("BSD,DHC->BSHC", h_BSD, gather(w["q_LDHC"]))
    k_BTKC = jnp.einsum("BTD,DKC->BTKC", h_BSD, gather(w["k_LDKC"]))
    v_BTKC = jnp.einsum("BTD,DKC->BTKC", h_BSD, gather(w["v_LDKC"]))
    a_BSHC = jax.nn.dot_product_attention(q_BSHC, k_BTKC, v_BTKC, is_causal=True)
    partial_BSD = jnp.einsum("BSHC,HCD->BSD", a_BSHC, gather(w["o_LHCD"], axis=2))
    x_BSD += jax.lax.psum(partial_BSD, "model")

    # MLP, with the hidden features of this device
    h_BSD = normed(x_BSD, w["norm2_LD"])
    gate_BSF = jax.nn.silu(h_BSD @ gather(w["gate_LDF"]))
    h_BSF = gate_BSF * (h_BSD @ gather(w["up_LDF"]))
    partial_BSD = h_BSF @ gather(w["down_LFD"], axis=1)
    return x_BSD + jax.lax.psum(partial_BSD, "model"), None


def loss_of(weights, tokens_BS, config, policy):
    """Mean cross entropy of the next token, with the vocabulary sharded along `model`."""
    stack = {name: w for name, w in weights.items() if "_L" in name}
    x_BSD = gather_as(config.dtype, weights["embed_VD"], axis=1)[tokens_BS]
    x_BSD, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x_BSD, stack)
    x_BSD = normed(x_BSD, weights["norm_D"])
    logits_BSV = x_BSD @ gather_as(config.dtype, weights["head_DV"])
    logits_BSV = logits_BSV.astype("float32")  # of this device's part of V

    largest_BS = jax.lax.pmax(jax.lax.stop_gradient(logits_BSV).max(-1), "model")
    exp_BSV = jnp.exp(logits_BSV - largest_BS[..., None])
    log_sum_BS = largest_BS + jnp.log(jax.lax.psum(exp_BSV.sum(-1), "model"))
    part = logits_BSV.shape[-1]
    entry_V = jax.lax.axis_index("model") * part + jnp.arange(part)
    is_next_BSV = jnp.roll(tokens_BS, -1, axis=1)[..., None] == entry_V
    chosen_BS = jax.lax.psum(jnp.where(is_next_BSV, logits_BSV, 0).sum(-1), "model")
    return jax.lax.pmean((log_sum_BS - chosen_BS).mean(), ("replica", "data"))


adam = optax.scale_by_adam()


def step_on(mesh, config, B, S, policy=None):
    """The jitted step, and the shapes of weights, moments and tokens on this mesh."""

    def step(weights, moments, tokens_BS):
        loss, gradients = jax.value_and_grad(loss_of)(weights, tokens_BS, config, policy)
        updates, moments = adam.update(gradients, moments)
        weights = jax.tree.map(lambda w, u: w - 3e-4 * u, weights, updates)
        return weights, moments, loss

    def abstract_array(dims, spec, dtype="float32"):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=jax.NamedSharding(mesh, spec))

    named = weights_of(config)
    specs = {name: spec for name, (_, spec) in named.items()}
    state, batch = (specs, optax.ScaleByAdamState(P(), specs, specs)), P(("replica", "data"))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(*state, batch), out_specs=(*state, P()))
    weights = {name: abstract_array(*one) for name, one in named.items()}
    moments = optax.ScaleByAdamState(abstract_array((), P(), "int32"), weights, weights)
    tokens_BS = abstract_array((B, S), batch, "int32")
    return jax.jit(mapped, donate_argnums=(0, 1)), weights, moments, tokens_BS


def traffic(config: Config, sizes: dict[str, int], sequences: int, S: int) -> dict[str, int]:
    """Payload in bytes of one device and step, the whole arrays, for a step with remat."""
    gathers = scatters = 0
    for name, (dims, spec) in weights_of(config).items():
        if "data" in spec:
            size = 2 * math.prod(dims) // (sizes["model"] if "model" in spec else 1)
            gathers += 2 * size if "_L" in name else size
            scatters += size
    sums = (5 * config.L + 1) * 2 * sequences * S * config.D if sizes["model"] > 1 else 0
    return {
        "gathers along data": gathers,
        "scatters along data": scatters,
        "sums along model": sums,
    }


# --------------------------------------------------------------------- what asks about it

H100 = Path(__file__).resolve().parents[1] / "book" / "compiled" / "h100.txtpb"
AVAILABLE = {  # bytes that a program can use of one device
    "v5e": 15.75 * 2**30,
    "v5p": 95.73 * 2**30,
    "h100": 0.75 * 85.5e9,  # by default JAX takes three quarters
}


def devices_of(machine: str, target: Path) -> list[Any]:
    """Devices that are described and not here: "v5e:4x4", "h100:64".

    Raises:
      RuntimeError: the compiler is not installed, or does not know the name.
    """
    chip, _, grid = machine.partition(":")
    if chip != "h100":
        return list(topologies.get_topology_desc(machine, "tpu").devices)
    count = int(grid)
    shape = f"1x{max(count // 8, 1)}x{min(count, 8)}"  # networks, nodes in each, devices in each
    told = target.read_text("utf-8")
    return list(
        topologies.get_topology_desc("", "cuda", topology=shape, target_config=told).devices
    )


def policy_of(name: str | None) -> Any:
    """Compute everything of a layer again, but send what has this name to the host."""
    if name is None:
        return None
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[name],
        offload_src="device",
        offload_dst="pinned_host",
    )


def abstract_mesh(sizes: dict[str, int]) -> jax.sharding.AbstractMesh:
    types = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def without_compiler(config: Config, sizes: dict[str, int], args: argparse.Namespace) -> None:
    """Print what shapes and the lowered program say."""
    sequences = args.sequences * sizes["model"]  # of one device: the group along model shares them
    B = sequences * sizes["replica"] * sizes["data"]
    step, *shapes = step_on(abstract_mesh(sizes), config, B, args.S, policy_of(args.offload))
    text = step.trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()
    moves = text.count('"pinned_host"')
    if args.offload and not moves:
        raise SystemExit(f"nothing is called {args.offload!r}, so nothing is offloaded")
    print(f"{ms.memory(shapes).bytes_per_device:,} bytes of state and batch on each device")
    print(f"{text.count('stablehlo.dot_general')} matmuls, {moves} moves to the host, in the text")
    for what, size in traffic(config, sizes, sequences, args.S).items():
        print(f"{size:,} bytes of {what}")


def compiled_for(config: Config, sizes: dict[str, int], args: argparse.Namespace) -> bool:
    """Compile and print; does it fit?"""
    chip = args.machine.partition(":")[0]
    devices = devices_of(args.machine, args.target)
    if len(devices) != math.prod(sizes.values()):
        raise SystemExit(f"{args.machine} has {len(devices)} devices, and the mesh {sizes}")
    types = (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)
    B = args.sequences * len(devices)
    step, *shapes = step_on(mesh, config, B, args.S, policy_of(args.offload))
    began = time.process_time()
    try:
        program = step.lower(*shapes).compile()
    except jax.errors.JaxRuntimeError as error:
        state = ms.memory(shapes).bytes_per_device
        print(str(error).splitlines()[0])
        print(f"Of that, {state:,} bytes are state and batch.")
        return False
    print(f"compiled in {time.process_time() - began:.0f} processor seconds\n")
    memory = ms.memory(program)
    print(memory, "\n")
    print(ms.collectives(program, mesh).by("kind", "axes", "dtype"), "\n")
    print(ms.overlap(program, mesh).by("kind", "axes", "hidden"), "\n")
    over = memory.bytes_per_device - AVAILABLE[chip]
    print("it fits" if over <= 0 else f"it does not fit: {over / 1e9:.2f} GB too many")
    return over <= 0


def main(arguments: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument("machine", help="v5e:4x4, v5e:16x16, v5p:8x16x16, h100:64")
    options.add_argument("--replica", type=int, default=1, help="copies of the sharded state")
    options.add_argument("--data", type=int, default=1, help="devices that share weights and batch")
    options.add_argument(
        "--model", type=int, default=1, help="devices that share heads and features"
    )
    options.add_argument("--sequences", type=int, default=1, help="for each device")
    options.add_argument("--S", type=int, default=4096, help="tokens in a sequence")
    options.add_argument("--offload", metavar="NAME", help="send what has this name to the host")
    options.add_argument("--target", type=Path, default=H100, help="the numbers of a GPU, for XLA")
    options.add_argument("--without-compiler", action="store_true")
    args = options.parse_args(arguments)
    sizes = {name: getattr(args, name) for name in ("replica", "data", "model")}
    if args.machine.partition(":")[0] not in AVAILABLE:
        options.error(f"{args.machine}: name a machine such as v5e:4x4, v5p:8x16x16 or h100:64")
    config = Config()
    without_compiler(config, sizes, args)
    return 0 if args.without_compiler or compiled_for(config, sizes, args) else 1


if __name__ == "__main__":
    sys.exit(main())
