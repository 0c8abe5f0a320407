"""Steps of chapter 6's transformer under a table, as stored and as compiled here; for 06a and 06f."""

import functools

from many_devices.compiled import stored_program
from many_devices.logical import mesh_of, step_program

IMAGES = 64  # of the stored programs of the large model
TOKENS_OF_AN_IMAGE = 16
RING = 7 / 8  # of the whole, which a device of eight sends in a gather or a reduce-scatter


def sent(name, compiler):
    return sum(row["wire"] for row in stored_program(name)[compiler]["moves"])


@functools.cache
def compiled(config, rules, shape, B):
    """The step, compiled here, and its mesh."""
    mesh = mesh_of(*shape)
    return step_program(config, rules, mesh, B), mesh
