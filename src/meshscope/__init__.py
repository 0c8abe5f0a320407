"""Place, move, cost: instruments for sharded JAX programs.

``show`` draws which device holds which block of an array, ``collectives`` lists what the devices of a
compiled program say to each other and ``overlap`` what runs meanwhile, ``memory`` counts bytes per
device, ``expect`` holds a program to what it may communicate, and ``assert_no_full_copy`` proves that
nothing was ever in one piece. No accelerator is needed:
``jax.config.update("jax_num_cpu_devices", 8)``, before anything else, gives eight devices.

>>> import jax, meshscope
>>> mesh = jax.make_mesh((2, 4), ("data", "model"))
>>> x = jax.device_put(jax.numpy.ones((8, 16)), jax.NamedSharding(mesh, jax.P("data", "model")))
>>> meshscope.memory(x).bytes_per_device
64
>>> compiled = jax.jit(lambda x: x.sum()).lower(x).compile()
>>> sorted(meshscope.collectives(compiled).by("axes"))
[('data',), ('model',)]
"""

from ._collectives import (
    Collective,
    Collectives,
    UnparsedCollectiveWarning,
    collectives,
    diff,
)
from ._expect import Bound, about, at_most, expect
from ._full_copies import FullCopies, FullCopy, assert_no_full_copy, full_copies
from ._memory import Leaf, Memory, ProgramMemory, memory
from ._overlap import Overlap, Overlaps, overlap
from ._plan import Plan, plan
from ._plan_chips import CHIPS, Chip
from ._plan_outcome import Outcome
from ._plan_step import Step
from ._show import Drawing, show
from ._svg import PALETTE
from ._totals import Table, Totals

__version__ = "0.2.0"

__all__ = [
    "Bound",
    "CHIPS",
    "Chip",
    "Collective",
    "Collectives",
    "Drawing",
    "FullCopies",
    "FullCopy",
    "Leaf",
    "Memory",
    "Outcome",
    "Overlap",
    "Overlaps",
    "PALETTE",
    "Plan",
    "ProgramMemory",
    "Step",
    "Table",
    "Totals",
    "UnparsedCollectiveWarning",
    "about",
    "assert_no_full_copy",
    "at_most",
    "collectives",
    "diff",
    "expect",
    "full_copies",
    "memory",
    "overlap",
    "plan",
    "show",
]
