"""The equations of a traced function, at any depth."""

import types
from typing import NamedTuple

import jax
from jax.extend.core import Var


def equations(jaxpr, primitive=None):
    """Each equation, or each of one primitive, in order, and how often it runs; of `cond`, all branches."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if primitive in (None, name):
            yield equation, 1
        times = equation.params["length"] if name == "scan" else 1
        values = list(equation.params.values())
        for value in jax.tree.leaves(values, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from ((found, times * n) for found, n in equations(inner, primitive))


def kept_for_backward(loss_of, weights, batch, mesh, specs):
    """The shapes of what the backward pass of a loss under `shard_map` needs on a device."""
    kept = []

    def forward(weights, batch_block):
        loss, backward = jax.vjp(lambda weights: loss_of(weights, batch_block), weights)
        kept.extend(leaf.shape for leaf in jax.tree.leaves(backward))
        return loss

    mapped = jax.shard_map(forward, mesh=mesh, in_specs=specs, out_specs=jax.P())
    jax.eval_shape(mapped, weights, batch)
    return kept


class Behind(NamedTuple):
    """How many messages, and how many products, have to end one after another before this can start."""

    messages: int
    products: int


def waits_of(jaxpr):
    """What each `ppermute` and each product waits for; a `cond` with a product in it counts as one."""
    behind, messages, products = {}, [], []
    for equation in jaxpr.eqns:
        operands = [variable for variable in equation.invars if isinstance(variable, Var)]
        before = [behind.get(variable, Behind(0, 0)) for variable in operands]
        waits = Behind(*map(max, zip(Behind(0, 0), *before)))
        alone = types.SimpleNamespace(eqns=[equation])
        if equation.primitive.name == "ppermute":
            messages.append(waits)
            waits = waits._replace(messages=waits.messages + 1)
        elif any(equations(alone, "dot_general")):
            products.append(waits)
            waits = waits._replace(products=waits.products + 1)
        behind |= dict.fromkeys(equation.outvars, waits)
    return messages, products
