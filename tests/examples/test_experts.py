"""examples/experts.py: equal to the dense mixture where nothing is dropped, and drops are counted."""

import re

import pytest


@pytest.mark.parametrize(
    "devices, mesh, tokens", [(8, "1 x 8", 64), (6, "3 x 2", 85), (1, "1 x 1", 512)]
)
def test_it_trains_with_and_without_drops(run, devices, mesh, tokens):
    """On eight devices, on a number that the experts do not divide, and on one."""
    said = run(devices, "import experts; experts.main()")
    assert said.startswith(f"{mesh} devices, {tokens} tokens on each\n")
    row = r"factor (.+): loss (.+) to (.+), dropped (\d+) to (\d+) of ([\d,]+) routes"
    (whole, some) = re.findall(row, said)
    (dense,) = re.findall(r"dense: +loss (.+) at first", said)
    assert (whole[0], some[0]) == ("4", "1.25")
    assert whole[1] == dense and whole[3] == whole[4] == "0" and int(some[3]) > 100
    assert whole[5] == f"{2 * tokens * devices:,}"
    assert float(whole[2]) < 0.5 and float(some[2]) < 1


def test_an_expert_is_stored_once_in_each_group(run):
    """On 2 x 4 devices each has two experts, and the gradient is that of the dense program."""
    code = """
from functools import partial
import jax, numpy as np
import experts

auto = 2 * (jax.sharding.AxisType.Auto,)
mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=auto)
keys = jax.random.split(jax.random.key(0), 6)
params = {
    name: 0.2 * jax.random.normal(key, shape)
    for key, (name, shape) in zip(keys, experts.shapes.items())
}
batch = jax.random.normal(keys[5], (64, 64)), np.arange(64) % 10
(loss, dropped), gradient = experts.program_on(mesh, partial(experts.mixture, Q=8))(params, batch)
dense = jax.grad(partial(experts.loss_of, layer=experts.dense_mixture), has_aux=True)
wanted, _ = dense(params, batch)
for name in params:
    np.testing.assert_allclose(gradient[name], wanted[name], rtol=1e-3, atol=1e-6)
print(int(dropped), gradient["up_EDF"].addressable_shards[0].data.shape)
"""
    assert run(8, code) == "0 (2, 32, 64)\n"
