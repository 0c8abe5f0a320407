"""Small helpers that several pages use. Each stands in full on the page that introduces it."""

import contextlib
import io
import textwrap

import jax

import meshscope as ms


def put(x, mesh, *spec):
    """The array x on the mesh, sharded by jax.P(*spec); without entries, copies."""
    return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))


def traffic(function, *inputs, mesh=None):
    """The collectives of the program that jax.jit makes of function and inputs."""
    return ms.collectives(jax.jit(function).lower(*inputs).compile(), mesh)


def misplaced(model, mesh):
    """One line for each parameter that is not where its annotation says."""
    from flax import nnx  # here, because chapters 7 and 8 are about JAX alone

    lines = []
    for path, weight in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name = ".".join(map(str, path))
        names = weight.get_metadata().get("out_sharding")  # None if nobody annotated
        if names is None:
            lines.append(f"{name}: no annotation")
        else:
            wanted = jax.NamedSharding(mesh, jax.P(*names))
            if not weight.sharding.is_equivalent_to(wanted, weight.ndim):
                lines.append(
                    f"{name}: annotated {names}, on each device "
                    f"{weight.sharding.shard_shape(weight.shape)}"
                )
    return lines


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
