"""The page "Write the order yourself: `program_order` and `psum_scatter_start`"."""

import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from pages import cells_of, compiled_for_cpu, run_again

PAGE = "09h-program-order"
since_0_12 = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="psum_scatter_start is new in JAX 0.12"
)
BARRIER = "optimization_barrier"


@pytest.mark.parametrize(
    "cell, name", [("as-written", "psum_scatter_start"), ("program-order", "program_order")]
)
def test_on_an_older_release_the_page_says_what_is_missing(page, monkeypatch, capsys, cell, name):
    """There each of the two cells prints one sentence, and the rest of the page runs."""
    assert hasattr(jax.lax, "psum_scatter_start") == (jax.__version_info__ >= (0, 12))
    monkeypatch.delattr(jax.lax, "psum_scatter_start", raising=False)
    run_again(page, PAGE, cell)
    assert f"has no {name}: it came in 0.12" in capsys.readouterr().out


@since_0_12
def test_program_order_puts_a_barrier_between_each_step_and_the_next(page):
    """The matmul is between start and end in both programs, and barriers hold it there in one."""
    steps = ["reduce-scatter-start", "dot_general", "reduce-scatter-done"]
    assert page.asked(page.beside_a_matmul) == steps
    found = page.asked(page.ordered)
    assert [step for step in found if step != BARRIER] == steps
    before, after = found.index("dot_general"), found.index("reduce-scatter-done")
    assert BARRIER in found[:before] and BARRIER in found[before:after]


@since_0_12
def test_only_the_scatter_has_a_start():
    """Of jax.lax in JAX 0.12."""
    starts = [name for name in dir(jax.lax) if name.endswith("_start")]
    assert starts == ["psum_scatter_start"] or jax.__version_info__ >= (0, 13)


@since_0_12
def test_the_start_of_a_scatter_cannot_be_differentiated(page):
    """jax.grad raises NotImplementedError."""

    def loss(term_DF):
        return jax.lax.psum_scatter_start(term_DF, "data", tiled=True).done().sum()

    specs = {"in_specs": jax.P("data"), "out_specs": jax.P("data")}
    mapped = jax.shard_map(jax.grad(loss), mesh=page.mesh, **specs)
    with pytest.raises(NotImplementedError, match="reduce_scatter_start"):
        jax.eval_shape(mapped, jnp.ones((128, 32)))


COMPILE = """
specs = dict(in_specs=(P("data"), P(), P("data")), out_specs=P("data"))
mapped = jax.shard_map({function}, mesh=mesh, **specs)
inputs = jnp.ones((64, 16)), jnp.ones((16, 32)), jnp.ones((8 * 16, 32))
lowered = jax.jit(mapped).lower(*inputs)
print("lowered", flush=True)
print(lowered.compile().as_text())
"""


@since_0_12
@compiled_for_cpu
def test_the_compiler_for_cpu_takes_the_first_program_and_dies_of_the_second():
    """A synchronous reduce-scatter, or a segmentation fault; each in a process of its own."""
    cells = [
        cell.source for cell in cells_of(PAGE) if cell.id in ("start", "asked", "program-order")
    ]
    start = "\n\n".join(["import many_devices\nmany_devices.setup()", *cells])
    ended = []
    for function in ("beside_a_matmul", "ordered"):
        program = start + COMPILE.format(function=function)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert "\nlowered\n" in done.stdout, done.stderr
        ended.append(done)
    first, second = ended
    assert first.returncode == 0 and " reduce-scatter(" in first.stdout
    if jax.__version__ == "0.12.0.1":
        assert second.returncode == -signal.SIGSEGV, second.stderr
