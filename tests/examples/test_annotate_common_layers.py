"""Every layer of the example is sharded as annotated, and computes what a plain one does."""

import math
import re
from pathlib import Path

import pytest
from machines import DEVICES

PAGE = "book/deeper/02a-flax-layers.md"

PIECES = """
import jax, numpy as np
import annotate_common_layers as example
from flax import nnx

example.main(FSDP)
print("---")
mesh = example.every_device()
with jax.set_mesh(mesh):
    layers = example.common_layers(nnx.Rngs(0), FSDP)
with nnx.use_eager_sharding(False):
    plain = example.common_layers(nnx.Rngs(0))

for name, weight in example.weights(layers):
    wanted = jax.NamedSharding(mesh, jax.P(*weight.out_sharding))
    assert weight.sharding.is_equivalent_to(wanted, weight.ndim), name
    print(name, weight.addressable_shards[0].data.size)

x = np.random.default_rng(0).normal(size=(8, 64)).astype("float32")
image = np.random.default_rng(1).normal(size=(2, 8, 8, 3)).astype("float32")
inputs = {"up": x, "heads": x, "norm": x, "down": np.tile(x, 4), "patches": image,
          "embed": np.arange(8), "attend": x.reshape(2, 4, 64)}
assert inputs.keys() == layers.keys()
for name, value in inputs.items():
    expected = plain[name](jax.device_put(value, jax.devices()[0]))
    np.testing.assert_allclose(layers[name](value), expected, atol=1e-5, err_msg=name)
"""


@pytest.mark.parametrize("devices", DEVICES)
def test_layers_lie_as_annotated_and_compute_what_plain_ones_do(run, devices):
    table, _, pieces = run(devices, "FSDP = None\n" + PIECES).partition("---\n")
    parts = math.gcd(devices, 4)
    lines = table.splitlines()
    assert lines[0] == f"{devices} devices: {{'data': {devices // parts}, 'model': {parts}}}"
    assert len(lines) == 2 + 17
    up = next(line for line in lines if line.startswith("up.kernel"))
    assert re.search(rf"\(64, 256\) +\(None, 'model'\) +\(64, {256 // parts}\)$", up)

    sizes = dict(line.split() for line in pieces.splitlines())
    sharded = {
        "up.kernel": 64 * 256,
        "up.bias": 256,
        "down.kernel": 256 * 64,
        "embed.embedding": 512 * 64,
        "heads.kernel": 64 * 64,
        "patches.kernel": 48 * 64,
        "patches.bias": 64,
        "attend.query.kernel": 64 * 64,
        "attend.query.bias": 64,
        "attend.out.kernel": 64 * 64,
    }
    for name, size in sharded.items():
        assert int(sizes[name]) == size // parts, name
    for name in ("down.bias", "attend.out.bias", "norm.scale"):
        assert int(sizes[name]) == 64, name


def test_with_fsdp_the_large_weights_are_sharded_along_both_axes(run):
    _, _, pieces = run(8, 'FSDP = "data"\n' + PIECES).partition("---\n")
    sizes = {name: int(size) for name, size in map(str.split, pieces.splitlines())}
    for name in ("up.kernel", "down.kernel", "embed.embedding"):
        assert (
            sizes[name]
            == {"up": 64 * 256, "down": 256 * 64, "embed": 512 * 64}[name.split(".")[0]] // 8
        )
    for name in ("heads.kernel", "attend.query.kernel", "attend.out.kernel"):
        assert sizes[name] == 64 * 64 // 8
    assert sizes["patches.kernel"] == 48 * 64 // 2  # one large dimension: along data alone
    assert sizes["up.bias"] == 256 // 4 and sizes["norm.scale"] == 64


def test_the_page_on_layers_shows_this_very_function():
    root = Path(__file__).parents[2]
    chapter = (root / PAGE).read_text("utf-8")
    example = (root / "examples" / "annotate_common_layers.py").read_text("utf-8")
    function = re.search(r"^def along\(.*?(?=\n\n\n)", example, re.M | re.S)[0]
    assert function in chapter, f"copy along from the example into {PAGE}"
