"""The equations of a traced function, at any depth."""

import jax


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
