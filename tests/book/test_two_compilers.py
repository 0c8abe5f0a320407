"""One program, three compilers: what ZeRO-1 and FSDP send, and how to compile for chips elsewhere."""

import re

import pytest

from many_devices.compiled import stored_program
from pages import source_of

PROGRAMS = "train-dp", "train-zero1", "train-fsdp"  # a step of the stacked model, by strategy


def told():
    """The gathers that the page tells of the three strategies, by compiler."""
    text = source_of("two-compilers").read_text("utf-8")
    (line,) = re.findall(r"(?m)^- \*\*ZeRO-1 and FSDP, counted in gathers.*$", text)
    three = r"([\d.]+), ([\d.]+) and ([\d.]+) "
    names = {"gpu": "gathers as compiled for H100", "tpu": "for TPU v5e", "cpu": "for CPU"}
    return {key: re.search(three + name, line).groups() for key, name in names.items()}


@pytest.mark.parametrize("compiler", ["gpu", "tpu", "cpu"])
def test_gathers_of_the_three_strategies(compiler):
    """In gathers of all weights, data parallelism, ZeRO-1 and FSDP send what the page tells."""

    def sent(name):
        return sum(move["wire"] for move in stored_program(name)[compiler]["moves"])

    gather = sent("train-dp") / 2  # its all-reduce scatters, then gathers
    for name, number in zip(PROGRAMS, told()[compiler], strict=True):
        assert f"{sent(name) / gather:.1f}" == f"{float(number):.1f}", name


def kinds(name, compiler):
    return {move["kind"] for move in stored_program(name)[compiler]["moves"]}


@pytest.mark.parametrize("name", ["train-zero1", "train-fsdp"])
def test_h100_and_tpu_form_reduce_scatters_and_cpu_does_not(name):
    """Of a sum of which each device keeps its piece, CPU's compiler makes an all-reduce, the others a
    reduce-scatter."""
    assert "reduce-scatter" in kinds(name, "gpu") and "reduce-scatter" in kinds(name, "tpu")
    assert "reduce-scatter" not in kinds(name, "cpu")


def test_the_tpus_compiler_gathers_weights_of_fsdp_in_bfloat16():
    """The TPU's compiler gathers FSDP's weights in bfloat16, the ones for H100 and CPU in float32."""
    dtypes = {
        compiler: {
            move["dtype"]
            for move in stored_program("train-fsdp")[compiler]["moves"]
            if move["kind"] == "all-gather"
        }
        for compiler in ("gpu", "tpu", "cpu")
    }
    assert dtypes == {"gpu": {"float32"}, "tpu": {"bfloat16"}, "cpu": {"float32"}}
