"""Operations of the matrix products of a traced program, loops multiplied out."""

from __future__ import annotations

import math
from typing import Any


def traced_flops(jaxpr: Any) -> int:
    """Operations of every ``dot_general`` and convolution of a jaxpr, scans multiplied out.

    Of a conditional the dearest branch counts, and the body of a ``while`` once. What is
    inside a hand-written kernel is not seen. Inside ``shard_map``, shapes are those of one
    device, and count for all of them.

    Args:
      jaxpr: what ``jax.jit(f).trace(...).jaxpr`` is.
    """
    total = 0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, given = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), _ = given["dimension_numbers"]
            left = equation.invars[0].aval.shape
            inner = math.prod(left[dim] for dim in contracted)
            total += 2 * math.prod(equation.outvars[0].aval.shape) * inner
        elif name == "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            outputs = kernel[given["dimension_numbers"].rhs_spec[0]]
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) // outputs
        elif name == "cond":
            total += max(map(traced_flops, given["branches"]))
        elif name != "pallas_call":
            times = given["length"] if name == "scan" else 1
            if name == "shard_map":
                manual = given.get("manual_axes", given["mesh"].axis_names)
                times = math.prod(given["mesh"].shape[axis] for axis in manual)
            total += times * sum(map(traced_flops, _inside(given)))
    return total


def _inside(params: dict[str, Any]) -> list[Any]:
    """The jaxprs among the parameters of an equation."""
    found = []
    for value in params.values():
        several = value if isinstance(value, (tuple, list)) else [value]
        found += [one for one in several if hasattr(getattr(one, "jaxpr", one), "eqns")]
    return found
