"""The page "What each strategy sends": the bytes of one step, for three compilers."""

import pytest

import meshscope as ms
from many_devices.compiled import stored_program
from many_devices.stacked import strategies, tiny
from many_devices.training import step_program
from pages import compiled_for_cpu

PAGE = "04f-what-strategies-send"
NAMES = ["data parallel", "FSDP", "tensor parallel", "FSDP x tensor"]

# Sizes in numbers, from the shapes of the weights
KERNELS = 2 * 4 * 96 * 384 + (64 + 16) * 96
B_F = 4 * 384
SMALL = 2 * 4 * 96
WEIGHTS = 4 * (KERNELS + B_F + SMALL)  # bytes
IN_BLOCKS = 4 * 2 * 4 * 96 * 384  # of the kernels of the blocks
GATHERED = 2 * IN_BLOCKS + 30_720  # those of the blocks twice, first and last once


def moves(name, compiler):
    """{(kind, axes): (payload, wire)} of a stored program, in bytes."""
    found = {}
    for row in stored_program(name)[compiler]["moves"]:
        key = row["kind"], tuple(row["axes"])
        payload, wire = found.get(key, (0, 0))
        found[key] = payload + row["payload"], wire + row["wire"]
    return found


def sent(name, compiler):
    return sum(wire for _, wire in moves(name, compiler).values()) / 1e6


@pytest.fixture(scope="module")
def programs():
    """The step of each strategy, compiled for CPU."""
    return {name: step_program(tiny, strategies[name], 64) for name in NAMES}


@compiled_for_cpu
def test_the_stored_programs_for_cpu_are_the_ones_that_this_page_compiles(page):
    """Each strategy sends in the page's own program what the stored program for CPU sends."""
    assert list(page.stored_names) == NAMES
    for name, stored in page.stored_names.items():
        program = step_program(tiny, strategies[name], 64)
        assert page.sent_mb(program) == pytest.approx(sent(stored, "cpu"))


@compiled_for_cpu
def test_the_table_prints_what_each_compiler_chose(page):
    """The last row is FSDP x tensor: 0.64, 0.49 and 0.79 MB."""
    assert page.name == "FSDP x tensor"
    assert f"{page.gpu:.2f} {page.tpu:.2f} {page.cpu:.2f}" == "0.64 0.49 0.79"


def test_fsdp_sends_3_2_mb_on_an_h100_and_4_2_for_cpu():
    """And data parallelism 2.1 on all three; for CPU, FSDP sends about twice as much."""
    told = [f"{sent('train-fsdp', compiler):.1f}" for compiler in ("gpu", "cpu")]
    assert told == ["3.2", "4.2"]
    assert 1.9 < sent("train-fsdp", "cpu") / sent("train-dp", "cpu") < 2.1
    same = {sent("train-dp", compiler) for compiler in ("gpu", "tpu", "cpu")}
    assert len(same) == 1 and f"{same.pop():.1f}" == "2.1"


@pytest.mark.parametrize("compiler", ["gpu", "tpu", "cpu"])
def test_data_parallelism_sums_all_gradients(compiler):
    """Data parallelism sends 2 x 7/8 x 1.22 = 2.13 MB, on all three; the loss is 8 bytes more."""
    assert moves("train-dp", compiler) == {
        ("all-reduce", ("data",)): (WEIGHTS + 8, 7 / 4 * (WEIGHTS + 8))
    }
    assert f"{WEIGHTS / 1e6:.2f}" == "1.22" and f"{7 / 4 * WEIGHTS / 1e6:.2f}" == "2.13"


@pytest.mark.parametrize("compiler, size", [("gpu", 1), ("cpu", 1), ("tpu", 2)])
def test_fsdp_gathers_the_kernels_of_the_blocks_twice(compiler, size):
    """And the first and the last kernel once; the TPU's gathers are in bfloat16."""
    assert GATHERED == 2_390_016
    payload, wire = moves("train-fsdp", compiler)["all-gather", ("data",)]
    assert payload * size == GATHERED and wire == 7 / 8 * payload
    types = {row["dtype"] for row in stored_program("train-fsdp")[compiler]["moves"]}
    assert ("bfloat16" in types) == (compiler == "tpu")


def test_for_h100_gradients_are_scattered():
    """On an H100 FSDP reduce-scatters the gradients of kernels, and all-reduces the small weights'."""
    found = moves("train-fsdp", "gpu")
    assert found["reduce-scatter", ("data",)] == (4 * KERNELS, 7 / 8 * 4 * KERNELS)
    assert found["all-reduce", ("data",)][0] == 4 * (B_F + SMALL) + 8


def test_the_tpus_compiler_pads_what_it_scatters():
    """Its reduce-scatters are larger than the gradients, so in all it saves less than its gathers."""
    scattered = moves("train-fsdp", "tpu")["reduce-scatter", ("data",)][0]
    assert scattered > 1.3 * 4 * KERNELS
    in_gathers = moves("train-fsdp", "gpu")["all-gather", ("data",)][1] / 2 / 1e6
    assert 0 < sent("train-fsdp", "gpu") - sent("train-fsdp", "tpu") < 0.5 * in_gathers


def test_for_cpu_gradients_are_summed_whole():
    """The CPU's FSDP has no reduce-scatter: it all-reduces all gradients."""
    found = moves("train-fsdp", "cpu")
    assert {kind for kind, _ in found} == {"all-gather", "all-reduce"}
    assert found["all-reduce", ("data",)][0] == WEIGHTS + 8


def test_on_an_h100_fsdp_sends_half_as_much_again():
    """1.5 times the bytes of data parallelism: two gathers and a reduce-scatter, each half a sum."""
    assert 1.45 < sent("train-fsdp", "gpu") / sent("train-dp", "gpu") < 1.55


@pytest.mark.parametrize("compiler", ["gpu", "tpu", "cpu"])
def test_tensor_parallelism_sums_activations(compiler):
    """Tensor parallelism gathers one weight, and adds up activations: for each layer one
    all-reduce forward and one backward."""
    found = moves("train-tp", compiler)
    assert set(found) == {("all-gather", ("model",)), ("all-reduce", ("model",))}
    assert found["all-gather", ("model",)][0] <= 4 * 64 * 96
    activation = 4 * 64 * 96
    rest = found["all-reduce", ("model",)][0] - (2 * 4 + 1) * activation
    assert 0 < rest <= 4 * 4 * 64  # a few numbers for each row


@compiled_for_cpu
def test_with_more_rows_tensor_parallelism_sends_more_and_fsdp_does_not(programs):
    """Twice the rows are twice the activations, while weights and gradients stay the same."""
    sums = {}
    for name in ("tensor parallel", "FSDP"):
        more = step_program(tiny, strategies[name], 128)
        tables = [ms.collectives(program).by("kind") for program in (programs[name], more)]
        sums[name] = [table.bytes("all-reduce") for table in tables]
    assert sums["tensor parallel"][1] == pytest.approx(2 * sums["tensor parallel"][0], rel=1e-3)
    assert sums["FSDP"][0] == sums["FSDP"][1]


@pytest.mark.parametrize("compiler", ["gpu", "cpu"])
def test_the_hybrid_does_all_of_it_in_smaller_pieces(compiler):
    """Weights are in four pieces along model, a ring of two sends 1/2, activations have half of
    the rows."""
    found, whole = moves("train-hybrid", compiler), moves("train-tp", compiler)
    payload, wire = found["all-gather", ("data",)]
    assert payload == GATHERED / 4 and wire == payload / 2
    assert found["all-reduce", ("model",)][0] < 0.6 * whole["all-reduce", ("model",)][0]
    activation = 4 * 32 * 96  # ten of them, and a few numbers for each row
    assert 0 < found["all-reduce", ("model",)][0] - 10 * activation <= 4 * 4 * 32
    gradients = found["all-reduce", ("data",)][0]
    gradients += found.get(("reduce-scatter", ("data",)), (0, 0))[0]
    assert gradients == 4 * ((KERNELS + B_F) // 4 + SMALL) + 8


@compiled_for_cpu
def test_the_programs_of_this_page_gather_sum_and_scatter_what_the_text_says(programs):
    """Compiled here: payloads by kind and axis of each strategy, with no reduce-scatter."""
    moved = {name: ms.collectives(program).by("kind", "axes") for name, program in programs.items()}
    for name in ("data parallel", "FSDP"):  # gradients; the loss: a sum and a count
        assert moved[name].bytes("all-reduce", "data") == WEIGHTS + 8
        assert moved[name].wire("all-reduce", "data") == 7 / 4 * (WEIGHTS + 8)
    assert moved["FSDP"].bytes("all-gather", "data") == GATHERED
    assert moved["tensor parallel"].bytes("all-gather", "model") == 4 * 64 * 96
    assert moved["FSDP x tensor"].bytes("all-gather", "data") == GATHERED // 4
    for table in moved.values():
        assert "reduce-scatter" not in {kind for kind, _ in table}


@compiled_for_cpu
def test_tensor_parallelism_sums_activations_and_not_logits(programs):
    """No sum along model has the shape of the logits: they stay sharded by classes."""
    seen = 0
    for name in ("tensor parallel", "FSDP x tensor"):
        for row in ms.collectives(programs[name]):
            rows_here = 64 // strategies[name].data
            if row.axes == ("model",) and row.shape[:1] == (rows_here,):
                assert row.shape in ((rows_here,), (rows_here, 96), (64, 96))
                seen += 1
    assert seen
