"""Small helpers for several pages; those of plain JAX are shown on the page that introduces them."""

import contextlib
import io
import logging
import sys
import textwrap
import warnings

import jax

import meshscope as ms


def put(x, mesh, *spec):
    """The array x on the mesh, sharded by jax.P(*spec); without entries, copies."""
    return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))


def traffic(function, *inputs, mesh=None):
    """The collectives of the program that jax.jit makes of function and inputs."""
    return ms.collectives(jax.jit(function).lower(*inputs).compile(), mesh)


def type_of(function, *inputs):
    """The type of function(*inputs), such as float32[8@data,32]; nothing runs."""
    return str(jax.typeof(jax.eval_shape(function, *inputs)))


def attempt(function, *inputs):
    """The message of the error that function(*inputs) raises; no error is a mistake."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # JAX may print a path as well
            function(*inputs)
    except Exception as error:
        message = str(error).split(" This error occurs at source")[0].strip()
        paragraph = message.split("\n\n")[0]
        return textwrap.fill(f"{type(error).__name__}: {paragraph}", 88)
    raise AssertionError("nothing was raised")


def silence_orbax():
    """Let a failed load or save show its error once: Orbax's log and its threads repeat it."""
    logging.disable()
    sys.unraisablehook = lambda unraisable: None
    warnings.filterwarnings("ignore", "coroutine .* was never awaited")
