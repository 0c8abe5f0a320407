"""One program, three compilers: what ZeRO-1 and FSDP send, and how to compile for chips elsewhere."""

import re

import pytest

from many_devices.compiled import stored_program
from pages import source_of

PROGRAMS = "train-dp", "train-zero1", "train-fsdp"  # chapter 4's step, by strategy


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
