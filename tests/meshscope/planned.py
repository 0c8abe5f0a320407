"""A transformer whose collectives are written out, so that what it sends is known.

It has attention and an MLP in each of L layers, float32 throughout, and every collective is a
line of this file: none is the compiler's choice.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

import meshscope as ms

P = jax.P
TABLES = {
    "DP": {"batch": "data"},
    "FSDP": {"batch": "data", "embed": "data"},
    "TP": {"heads": "model"},
    "FSDP x TP": {"batch": "data", "embed": "data", "heads": "model"},
    "HSDP": {"batch": ("data", "model"), "embed": "model"},
}
AXES = ("data", "model")


@dataclasses.dataclass(frozen=True)
class Sizes:
    L: int = 3
    D: int = 32
    F: int = 64
    H: int = 8
    C: int = 4
    B: int = 16
    S: int = 8


SIZES = Sizes()


def weights(sizes, mesh, rules):
    """The stacked weights, q, k, v, o and two of the MLP, as shapes with shardings."""
    L, D, F, H, C = sizes.L, sizes.D, sizes.F, sizes.H, sizes.C
    embed, heads = rules.get("embed"), rules.get("heads")

    def shape(dims, *spec):
        sharding = jax.NamedSharding(mesh, P(None, *spec))
        return jax.ShapeDtypeStruct((L, *dims), "float32", sharding=sharding)

    into, out = shape((D, H, C), embed, heads, None), shape((H, C, D), heads, None, embed)
    return {
        **{"q": into, "k": into, "v": into, "o": out},
        **{"up": shape((D, F), embed, heads), "down": shape((F, D), heads, embed)},
    }


def gathered(name, value, rules, cast_first):
    """A whole weight. Copies over other axes of the batch are told apart before it is gathered:

    then their gradients are summed after they are scattered, and not whole.
    """
    embed, batch = rules.get("embed"), rules.get("batch")
    if not embed:
        return value
    copies = tuple(axis for axis in (batch if isinstance(batch, tuple) else ()) if axis != embed)
    if copies and cast_first:
        value = jax.lax.pcast(value, copies, to="varying")
    dim = value.ndim - 1 if name in ("o", "down") else 0
    return jax.lax.all_gather(value, embed, axis=dim, tiled=True)


def layer(x_BSD, w, rules, cast_first):
    heads = rules.get("heads")
    whole = {name: gathered(name, value, rules, cast_first) for name, value in w.items()}

    def into(x):  # one sum of gradients, and not one for each product that x goes into
        return jax.lax.pcast(x, heads, to="varying") if heads else x

    def added(x):
        return jax.lax.psum(x, heads) if heads else x

    h_BSD = into(x_BSD)
    q, k, v = (jnp.einsum("BSD,DHC->BSHC", h_BSD, whole[name]) for name in "qkv")
    a = jax.nn.softmax(jnp.einsum("BSHC,BTHC->BHST", q, k))
    y = jnp.einsum("BHST,BTHC->BSHC", a, v)
    x_BSD = x_BSD + added(jnp.einsum("BSHC,HCD->BSD", y, whole["o"]))
    h_BSF = jnp.tanh(into(x_BSD) @ whole["up"])
    return x_BSD + added(h_BSF @ whole["down"])


def step(mesh, rules, sizes=SIZES, cast_first=True):
    """One step of gradient descent; what it sends in closed form."""
    batch = rules.get("batch")
    w = weights(sizes, mesh, rules)
    specs = {name: leaf.sharding.spec for name, leaf in w.items()}
    x_BSD = jax.ShapeDtypeStruct(
        (sizes.B, sizes.S, sizes.D), "float32", sharding=jax.NamedSharding(mesh, P(batch))
    )

    def loss(w, x_BSD):
        @jax.checkpoint
        def body(x_BSD, one):
            return layer(x_BSD, one, rules, cast_first), None

        x_BSD, _ = jax.lax.scan(body, x_BSD, w)
        found = (x_BSD**2).mean()
        return jax.lax.pmean(found, batch) if batch else found

    @functools.partial(jax.shard_map, in_specs=(specs, P(batch)), out_specs=specs)
    def train(w, x_BSD):
        gradients = jax.grad(loss)(w, x_BSD)
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, gradients)

    shards = 1
    for axis in (batch,) if isinstance(batch, str) else batch or ():
        shards *= mesh.shape[axis]
    rows = sizes.B * sizes.S // shards
    # Forward 2, backward 2, and once more that of attention, to compute a layer again.
    summed = 5 * sizes.L * rows * sizes.D * 4 if rules.get("heads") else 0
    return ms.Step(
        jax.jit(train, donate_argnums=0).trace(w, x_BSD),
        weights=w,
        batch=batch,
        activations={("all-reduce", "model"): summed} if summed else {},
    )
