"""The page "Memory": what strategies send, on three compilers, and how much of a GPU JAX takes."""

import os
import re
from unittest import mock

import pytest
from jaxlib import xla_client

import meshscope as ms
from many_devices.compiled import stored_program
from pages import BOOK, compiled_for_cpu

PAGE = "memory"
TEXT = (BOOK / "memory.md").read_text("utf-8")
PROGRAMS = {"data parallel": "train-dp", "ZeRO-1": "train-zero1", "FSDP": "train-fsdp"}
COMPILERS = {"H100": "gpu", "TPU v5e": "tpu", "CPU": "cpu"}
ALL_WEIGHTS = 1_219_584  # bytes of `tiny`, on eight devices
GATHER = 7 / 8 * ALL_WEIGHTS


def gathers(strategy, compiler):
    """What a device sends in a step of `tiny`, in gathers of all weights, as stored."""
    moves = stored_program(PROGRAMS[strategy])[COMPILERS[compiler]]["moves"]
    return sum(move["wire"] for move in moves) / GATHER


def table():
    """The page's table of prices: {strategy: {column: text}}."""
    lines = TEXT.splitlines()
    (start,) = [
        i for i, line in enumerate(lines) if line.startswith("| strategy | divides | a device has")
    ]
    head, rows = lines[start], lines[start + 2 : start + 5]
    names = [cell.strip() for cell in head.strip("|").split("|")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {row[0]: dict(zip(names, row, strict=True)) for row in cells}


# One price in gathers


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("strategy", PROGRAMS)
def test_the_table_has_what_each_compiler_sends_in_gathers(strategy, compiler):
    """H100, TPU v5e and CPU: in gathers of all weights a step sends what the table says."""
    assert table()[strategy][compiler] == f"{gathers(strategy, compiler):.1f}"


@pytest.mark.parametrize("strategy", PROGRAMS)
def test_the_compiler_for_h100_reaches_the_ideal(strategy):
    """The compiler for H100 sends the ideal number of gathers: 2, 1 + 1 and 2 + 1."""
    ideal = sum(int(number) for number in table()[strategy]["ideal"].split("+"))
    assert gathers(strategy, "H100") == pytest.approx(ideal, abs=0.05)


@pytest.mark.parametrize(
    "strategy, bytes_per_weight", [("data parallel", 4), ("ZeRO-1", 4), ("FSDP", 6)]
)
def test_the_ideal_is_that_of_the_page_about_strategies(strategy, bytes_per_weight):
    """A gather in bfloat16 is 2N bytes, so the ideal column is 4N, 4N and 6N, as on the strategies page."""
    ideal = sum(int(number) for number in table()[strategy]["ideal"].split("+"))
    assert 2 * ideal == bytes_per_weight
    strategies = (BOOK / "strategies.md").read_text("utf-8")
    name = {"data parallel": "data parallelism"}.get(strategy, strategy)
    (row,) = re.findall(rf"^\|.*\| {name} \(\[.*\| \$(\d)N\$", strategies, re.M)
    assert int(row) == bytes_per_weight


@compiled_for_cpu
def test_the_stored_rows_are_what_the_cpu_compiler_makes_here(page):
    """The programs of the table are those of this page, and for CPU they send what is stored."""
    programs = {"data parallel": page.plain.program, "ZeRO-1": page.zero1.program}
    for strategy, program in programs.items():
        assert page.sent_mb(program) * 1e6 / GATHER == pytest.approx(gathers(strategy, "CPU"))


@pytest.mark.parametrize("strategy", ["ZeRO-1", "FSDP"])
def test_h100_and_tpu_form_reduce_scatters_and_cpu_does_not(strategy):
    """The compilers for H100 and TPU v5e make reduce-scatters, CPU's makes an all-reduce."""
    kinds = {
        name: {move["kind"] for move in stored_program(PROGRAMS[strategy])[compiler]["moves"]}
        for name, compiler in COMPILERS.items()
    }
    assert "reduce-scatter" in kinds["H100"] and "reduce-scatter" in kinds["TPU v5e"]
    assert "reduce-scatter" not in kinds["CPU"]


def test_zero_1_sends_as_much_as_data_parallelism_for_h100_a_sixth_more_for_tpu():
    """ZeRO-1 sends as much as data parallelism for H100, a sixth more for TPU v5e, half more for CPU."""
    ratio = {name: gathers("ZeRO-1", name) / gathers("data parallel", name) for name in COMPILERS}
    assert ratio["H100"] == 1
    assert ratio["TPU v5e"] == pytest.approx(1 + 1 / 6, abs=0.01)
    assert ratio["CPU"] == pytest.approx(1.5, abs=0.01)


def test_the_tpus_compiler_gathers_weights_of_fsdp_in_bfloat16():
    """The TPU's compiler gathers FSDP's weights in bfloat16, the one for H100 in float32."""
    dtypes = {
        name: {
            move["dtype"]
            for move in stored_program("train-fsdp")[key]["moves"]
            if move["kind"] == "all-gather"
        }
        for name, key in COMPILERS.items()
    }
    assert dtypes == {"H100": {"float32"}, "TPU v5e": {"bfloat16"}, "CPU": {"float32"}}


# How much of a GPU JAX takes


@compiled_for_cpu
def test_zero_1_needs_more_than_75_percent_of_an_h100_and_fsdp_less(page):
    """ZeRO-1's 68 GB are more than 75 % of an H100, about 64 GB, and FSDP's 53 are less."""
    h100 = 81_559 * 2**20 / 1e9  # what nvidia-smi says
    by_default = 0.75 * h100
    assert round(by_default) == 64
    totals = {name: page.total_gb(parts) for name, parts in page.memory.items()}
    assert totals["FSDP"] < by_default < totals["ZeRO-1"] < 0.95 * h100
    assert {name: round(totals[name]) for name in ("ZeRO-1", "FSDP")} == {"ZeRO-1": 68, "FSDP": 53}


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_both_names_of_the_variable_set_the_fraction(name):
    """XLA_CLIENT_MEM_FRACTION sets the fraction of memory, and so does its older name."""
    options = xla_client.generate_pjrt_gpu_plugin_options
    with mock.patch.dict(os.environ):
        for variable in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
            os.environ.pop(variable, None)
        assert "memory_fraction" not in options()  # XLA's own default then
        os.environ[name] = "0.95"
        assert options()["memory_fraction"] == 0.95


# Drift


@compiled_for_cpu
def test_in_eighths_the_weights_have_a_little_more_than_an_eighth(page):
    """In eighths the weights have 165,888 bytes, a little more than an eighth of 1,219,584."""
    whole = ms.memory(page.zero1.model).bytes_per_device
    assert (whole, page.weighed[-1]) == (1_219_584, 165_888)
    assert 1 < page.weighed[-1] / (whole / 8) < 1.1
