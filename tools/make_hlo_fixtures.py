"""Compile three small programs for a TPU v5e with 2x4 chips and keep their text.

No TPU is needed, only its compiler: run this in a virtual environment of its own,

    python -m venv /tmp/tpu && /tmp/tpu/bin/pip install "jax[tpu]==0.12.0.1"
    /tmp/tpu/bin/python tools/make_hlo_fixtures.py

It writes tests/meshscope/fixtures/tpu-*.hlo(.gz), which
tests/meshscope/test_collectives_tpu.py reads. The answers there are counted by hand from
the programs below.
"""

import gzip
import os
import pathlib

os.environ.update(JAX_PLATFORMS="cpu", ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_SKIP_MDS_QUERY="1")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402

FOLDER = pathlib.Path(__file__).parent.parent / "tests" / "meshscope" / "fixtures"
P = jax.P
DEVICES: np.ndarray = np.array(
    topologies.get_topology_desc(
        platform="tpu",
        topology_name="v5e:2x4",
        chip_config_name="default",
        chips_per_host_bounds=(2, 2, 1),
        num_slices=1,
        wrap=(False,) * 3,
    ).devices
)
GRID = Mesh(DEVICES.reshape(2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
LINE = Mesh(DEVICES, ("data",), axis_types=(AxisType.Auto,))
L, B, D, F = 4, 512, 1024, 4096


def shape(mesh, spec, *dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype, sharding=jax.NamedSharding(mesh, spec))


def kinds():
    """Every kind over one axis or both, two of them five times in a scan, in float32.

    The product of two large matrices gives the all-to-all something to hide behind, so
    that the compiler starts it early and ends it late.
    """

    def body(x, _):
        whole = jax.lax.all_gather(x, "model", tiled=True)
        return jax.lax.psum_scatter(jnp.tanh(whole), "model", tiled=True), None

    def f(x, v, a):
        x, _ = jax.lax.scan(body, x, None, length=5)
        x = jax.lax.ppermute(x, "model", [(0, 1), (1, 2), (2, 3), (3, 0)])
        x = jax.lax.psum(x, ("data", "model"))
        return x, jax.lax.all_to_all(v, "model", 0, 0), a @ a

    mapped = jax.shard_map(
        f,
        mesh=GRID,
        in_specs=(P("model"), P(), P()),
        out_specs=(P(), P(), P()),
        check_vma=False,
    )
    x = shape(GRID, P("model"), 64, 128, dtype=jnp.float32)
    v = shape(GRID, P(), 4, 256, 128, dtype=jnp.float32)
    a = shape(GRID, P(), 2048, 2048)
    options = {"xla_tpu_enable_async_all_to_all": True}
    return jax.jit(mapped).lower(x, v, a).compile(compiler_options=options)


def fsdp():
    """A gradient step of L blocks, each gathers its two weights, in bfloat16."""

    def step(weights, x):
        def block(h, pieces):
            w, v = (jax.lax.all_gather(p, "data", axis=0, tiled=True) for p in pieces)
            return h + jax.nn.relu(h @ w) @ v, None

        def loss(weights):
            h, _ = jax.lax.scan(block, x, weights)
            return jax.lax.pmean((h.astype(jnp.float32) ** 2).mean(), "data")

        gradients = jax.grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g.astype(w.dtype), weights, gradients)

    split = (P(None, "data"), P(None, "data"))
    mapped = jax.shard_map(step, mesh=LINE, in_specs=(split, P("data")), out_specs=split)
    weights = (shape(LINE, split[0], L, D, F), shape(LINE, split[1], L, F, D))
    return jax.jit(mapped).lower(weights, shape(LINE, P("data"), B, D)).compile()


def auto():
    """The same step, written without collectives: the compiler puts them in."""

    def step(weights, x):
        def block(h, pieces):
            place = jax.NamedSharding(GRID, P("data", "model"))
            h = jax.lax.with_sharding_constraint(h, place)
            return h + jax.nn.relu(h @ pieces[0]) @ pieces[1], None

        def loss(weights):
            h, _ = jax.lax.scan(block, x, weights)
            return (h.astype(jnp.float32) ** 2).mean()

        gradients = jax.grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g.astype(w.dtype), weights, gradients)

    weights = (
        shape(GRID, P(None, "data", "model"), L, D, F),
        shape(GRID, P(None, "model", "data"), L, F, D),
    )
    out = tuple(w.sharding for w in weights)
    x = shape(GRID, P("data"), B, D)
    return jax.jit(step, out_shardings=out).lower(weights, x).compile()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for program in (kinds, fsdp, auto):
        text = program().as_text().replace(__file__, "make_hlo_fixtures.py")
        target = FOLDER / f"tpu-{program.__name__}.hlo.gz"
        target.write_bytes(gzip.compress(text.encode(), mtime=0))
        print(f"{target.name}: {len(text):,} characters, {target.stat().st_size:,} bytes")
