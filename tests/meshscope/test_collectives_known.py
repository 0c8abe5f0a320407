"""Programs compiled for TPU and GPU whose traffic follows from their own lines (fixtures/make_known.py).

The answers are worked out by hand, from the shapes there. X is 64 x 256 numbers, 65,536 bytes in float32.
"""

import gzip
import pathlib
import re

import pytest
from jax.sharding import AbstractMesh

import meshscope as ms

pytestmark = pytest.mark.filterwarnings("error::meshscope.UnparsedCollectiveWarning")
KNOWN = pathlib.Path(__file__).parent / "fixtures" / "known"
GRID = AbstractMesh((2, 4), ("data", "model"))
LINE = AbstractMesh((8,), ("data",))
CUBE = AbstractMesh((2, 2, 2), ("a", "b", "c"))
X, W = 64 * 256 * 4, 2048 * 2048 * 2  # bytes of X, and of a weight in bfloat16

ANSWERS = {  # name: mesh, {(kind, axes, dtype): (executions, payload bytes, wire bytes)}
    # A device has half of X; two devices send 2 x 1/2 of it.
    "one_sum": (GRID, {("all-reduce", ("data",), "float32"): (1, X / 2, X / 2)}),
    # An eighth of X in bfloat16; eight devices send 2 x 7/8.
    "sum_over_both": (GRID, {("all-reduce", ("data", "model"), "bfloat16"): (1, X / 16, X / 16 * 7 / 4)}),
    # Half of 8 + 16 + 32 rows; four devices send 2 x 3/4. Values count one by one, combined or not.
    "three_sums": (GRID, {("all-reduce", ("model",), "float32"): (3, 28 * 1024, 28 * 1024 * 3 / 2)}),
    "gather": (GRID, {("all-gather", ("model",), "bfloat16"): (1, X / 2, X / 2 * 3 / 4)}),
    "scatter": (LINE, {("reduce-scatter", ("data",), "float32"): (1, X, X * 7 / 8)}),
    "exchange": (GRID, {("all-to-all", ("model",), "float32"): (1, X, X * 3 / 4)}),
    "shift": (GRID, {("collective-permute", ("model",), "float32"): (1, X / 4, X / 4)}),
    # Three rounds with a sum over data; in each four with a sum over model.
    "two_rounds": (GRID, {("all-reduce", ("data",), "float32"): (3, 3 * X, 3 * X),
                          ("all-reduce", ("model",), "float32"): (12, 12 * X, 12 * X * 3 / 2)}),
    # How often is decided by a value.
    "until_small": (GRID, {("all-reduce", ("data",), "float32"): (None, None, None)}),
    # One branch or the other, both the same.
    "either_way": (GRID, {("all-reduce", ("model",), "float32"): (1, X, X * 3 / 2)}),
    # Six gathers of a weight, each started early and ended late.
    "hidden_gathers": (LINE, {("all-gather", ("data",), "bfloat16"): (6, 6 * W, 6 * W * 7 / 8)}),
    "hidden_in_a_loop": (LINE, {("all-gather", ("data",), "bfloat16"): (6, 6 * W, 6 * W * 7 / 8)}),
    # The product of all rows is 2,048 x 2,048; every device keeps its rows of the sum.
    "scattered_gradient": (LINE, {("reduce-scatter", ("data",), "bfloat16"): (1, W, W * 7 / 8)}),
    # A device has 256 rows of x, and a partial sum of 256 x 512 numbers.
    "partial_sums": (GRID, {("all-reduce", ("model",), "float32"): (1, 256 * 512 * 4, 256 * 512 * 4 * 3 / 2)}),
    "of_three_axes": (CUBE, {("all-reduce", ("a", "c"), "float32"): (1, X, X * 3 / 2)}),
    # 16 rows of model, 128 columns of data.
    "some_by_hand": (GRID, {("all-reduce", ("model",), "float32"): (1, X / 8, X / 8 * 3 / 2)}),
}  # fmt: skip


# XLA for GPU puts the three values into one array first.
FOR_GPU = {"three_sums": {("all-reduce", ("model",), "float32"): (1, 28 * 1024, 28 * 1024 * 3 / 2)}}
BACKENDS = ("tpu", "gpu")


def known(backend, name):
    return gzip.decompress((KNOWN / backend / f"{name}.hlo.gz").read_bytes()).decode()


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_traffic_is_as_constructed(backend, name):
    mesh, answer = ANSWERS[name]
    if backend == "gpu":
        answer = FOR_GPU.get(name, answer)
    assert ms.collectives(known(backend, name), mesh).by("kind", "axes", "dtype") == answer


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_stored_program_has_an_answer(backend):
    stored = {path.name.removesuffix(".hlo.gz") for path in (KNOWN / backend).iterdir()}
    assert stored == set(ANSWERS)


def test_what_these_texts_are_there_for():
    """They hold what a parser could count twice, or miss."""
    for name in ("hidden_gathers", "hidden_in_a_loop"):
        assert len(re.findall(r" all-gather(?:-start)?\(", known("tpu", name))) > 0
        assert len(re.findall(r" all-gather-start\(", known("gpu", name))) > 0
    assert "AsyncCollectiveStart" in known("tpu", "hidden_gathers")
    fused = known("tpu", "scattered_gradient")
    assert " reduce-scatter(" in fused or "all-reduce-scatter" in fused
    rounds = known("tpu", "two_rounds")
    assert " while(" in rounds and "known_trip_count" not in rounds
    assert " concatenate(" in known("gpu", "three_sums")
