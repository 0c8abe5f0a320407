"""Chapter 16, "Compile for the machine you do not have"."""

import math

import jax
import pytest

import meshscope as ms
from many_devices.compiled import stored_memory, stored_program
from pages import check_exercise, exercises_of
from stored_steps import GB, GIB, MESHES, TPU, in_message, made, needs

PAGE = "16-compile-ahead"
LARGE = "train-large-fsdp"  # the page's step, as it was stored


# Your own step


def test_a_step_is_compiled_from_shapes(page):
    """Model, optimizer and batch are shapes alone, of 4.3 billion weights."""
    leaves = jax.tree.leaves((page.model, page.optimizer, page.batch))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert page.count == sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(page.model))
    assert f"{page.count / 1e9:.1f}" == "4.3" and f"{page.state / GB:.1f}" == "6.5"
    assert (page.large.L, page.large.D, page.large.F) == (32, 4096, 16384)


def test_compiling_for_2048_chips_took_75_seconds():
    """Of processor time, and about 2 GB, for the step with 8 billion weights."""
    took = stored_program("ahead-v5p-2048")["compiling"]
    assert math.prod(MESHES["ahead-v5p-2048"][0].values()) == 2048
    assert took["seconds"] == 75 and f"{took['gigabytes']:.0f}" == "2"


# Does it fit


def test_it_fits_eight_h100s_and_not_eight_chips_of_v5e(page):
    """By the CPU's compiler, and by the one for H100, which plans 53.9 GB."""
    assert page.state * 5 < page.needed.bytes_per_device
    assert page.fits(page.needed, page.H100) and not page.fits(page.needed, page.V5E)
    on_gpu = stored_memory(LARGE, "gpu")
    assert f"{on_gpu.bytes_per_device / GB:.1f}" == "53.9" and page.fits(on_gpu, page.H100)


def test_memory_is_what_jax_says_with_donated_arrays_once(page):
    """`ms.memory` adds up the parts of `memory_analysis()`, less what is aliased."""
    jax_says = page.compiled.memory_analysis()
    parts = "argument", "output", "temp"
    total = sum(getattr(jax_says, f"{part}_size_in_bytes") for part in parts)
    assert page.needed.bytes_per_device == total - jax_says.alias_size_in_bytes < total


def test_it_fits_up_to_the_last_byte(page):
    """On TPU by the peak, elsewhere by arguments, outputs and temporaries, less what is aliased."""
    memory = ms.ProgramMemory(arguments=10, outputs=4, temporaries=6, aliased=4)
    assert page.fits(memory, 16) and not page.fits(memory, 15)
    memory = ms.ProgramMemory(arguments=10, outputs=4, temporaries=6, aliased=4, peak=13)
    assert page.fits(memory, 13) and not page.fits(memory, 12)


def test_the_error_says_how_much_is_missing(page):
    """Of a v5e, 48.1 GB against 16.9 GB, 31.2 too many, and a GiB more of state is one more."""
    lines = page.textwrap.fill(page.message, 64).splitlines()
    says = "E1000: CompileTimeHbmOom", "(44.80G)", "available HBM (15.75G)"
    assert all(word in line for word, line in zip(says, lines, strict=True))
    counted = 44.80 * GIB
    found = counted, page.V5E, counted - page.V5E
    assert [f"{size / GB:.1f}" for size in found] == ["48.1", "16.9", "31.2"]
    assert in_message("ahead-v5e-16-two-more") - in_message("ahead-v5e-16-two") == pytest.approx(1)


def test_no_tpu_program_that_compiled_needs_more_than_a_chip_has(page):
    """For TPU, compile() is the check."""
    available = {"v5e": page.V5E, "v5p": ms.CHIPS["v5p"].hbm}
    names = [*TPU, "ahead-v5e-16-offload", "ahead-v5e-16-two-offload"]
    assert all(needs(name) <= available[name.split("-")[1]] for name in names)


def test_for_gpus_there_is_no_error(page):
    """145.7 GB on H100s of 85.5 GB, of which a program can use 64: compiled without an error."""
    memory = page.memory
    assert memory == stored_memory("ahead-h100-8-large", "gpu")
    assert f"{memory.bytes_per_device / GB:.1f}" == "145.7"
    assert "refused" not in made("ahead-h100-8-large")
    assert f"{81_559 * 2**20 / GB:.1f}" == "85.5" and not page.fits(memory, page.H100)
    assert f"{0.75 * 85.5:.0f}e9" == "64e9" and page.H100 == 64e9


# What it sends


def payloads(compiler):
    """The stored step's payload by kind, without what is hardly anything, such as the loss."""
    rows = stored_program(LARGE)[compiler]["moves"]
    found = {kind: 0 for kind in ("all-gather", "reduce-scatter", "all-reduce")}
    for row in rows:
        assert row["dtype"] == "float32"
        found[row["kind"]] += row["payload"]
    return {kind: size for kind, size in found.items() if size > 0.01 * GB}


def test_h100_sends_what_is_predicted(page):
    """Each weight gathered twice in float32, 34.4 GB, and each gradient scattered once, 17.2."""
    assert [f"{size / GB:.1f}" for size in (page.gathers, page.scatters)] == ["34.4", "17.2"]
    predicted = {"all-gather": page.gathers, "reduce-scatter": page.scatters}
    assert payloads("gpu") == pytest.approx(predicted, rel=2e-3)  # but for small weights


def test_the_cpus_compiler_makes_an_all_reduce_of_each_scatter(page):
    """By the page's own program and by the stored one; it sends twice as much as the scatters."""
    predicted = {"all-gather": page.gathers, "all-reduce": page.scatters}
    own = {kind: page.on_cpu.bytes(kind) for kind in predicted}
    assert own == pytest.approx(predicted, rel=2e-3) == payloads("cpu")
    assert page.on_cpu.bytes("reduce-scatter") == 0
    moves = {who: stored_program(LARGE)[who]["moves"] for who in ("cpu", "gpu")}
    reduced = sum(row["wire"] for row in moves["cpu"] if row["kind"] == "all-reduce")
    scattered = sum(row["wire"] for row in moves["gpu"] if row["kind"] == "reduce-scatter")
    assert reduced == pytest.approx(2 * scattered, rel=2e-3)


# The exercise


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)


def test_the_solution_raises_if_the_rest_alone_does_not_fit(page):
    """The solution raises an error where no number of chips is enough."""
    with pytest.raises(ValueError, match="the rest alone"):
        page.answer_chips(page.V5E)
