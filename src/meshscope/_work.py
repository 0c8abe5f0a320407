"""What an instruction of a compiled program computes: operations of matmuls, bytes of the rest."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from . import _hlo as hlo
from . import _programs as programs

# Instructions that compute nothing: they name values, hand them on, copy or wait.
_IDLE = {
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "domain"),
    *("partition-id", "replica-id", "opt-barrier", "optimization-barrier", "add-dependency"),
    *("get-dimension-size", "infeed", "outfeed"),
}
_RUNS = ("fusion", "call", "async")  # and, with -start, those that another stream runs
_GEMM = re.compile(r"gemm|\$matmul|__cublas\$(?!triangular)")  # a library's matmul, by its target
_MARKS = re.compile(r"AsyncCollective|Sharding|AllocateBuffer|MoveTo|annotate_|xla\.sdy|__nop")


@dataclass(frozen=True)
class Work:
    """What one instruction computes, with all that it calls.

    ``flops`` are those of matmuls, None where the text does not tell them. ``kernels`` counts
    calls of kernels, of which the text says only that they run. ``other_bytes`` are the sizes of
    the values that everything else writes.
    """

    matmuls: int = 0
    flops: int | None = 0
    kernels: int = 0
    other_bytes: int | None = 0


def total(parts: Iterable[Work], times: int | None = 1) -> Work:
    """The sum of several, each done so often; None times: nobody knows how often."""
    found = list(parts)

    def add(values: list[int | None]) -> int | None:
        known = [value for value in values if value is not None]
        if not any(known) and len(known) == len(values):
            return 0  # however often
        return None if times is None or len(known) < len(values) else times * sum(known)

    return Work(
        sum(one.matmuls for one in found),
        add([one.flops for one in found]),
        sum(one.kernels for one in found),
        add([one.other_bytes for one in found]),
    )


def of(program: hlo.Program, where: str, instruction: hlo.Instruction) -> Work:
    """The work of one instruction of a computation; a collective is none."""
    here, opcode = program.computations[where], instruction.opcode
    called = [name for _, name in instruction.called() if name in program.computations]
    if opcode in _IDLE or programs.is_collective(instruction):
        return Work()
    if opcode == "while":
        turns = programs.trips(program, where, instruction)
        return total((inside(program, name) for name in called), turns)
    if opcode == "conditional":
        return _one_of([inside(program, name) for name in called])
    if opcode.removesuffix("-start") in _RUNS and called:
        work = total(inside(program, name) for name in called)
        if work.matmuls or work.kernels or opcode == "call" or _exchanges(program, called):
            return work if opcode == "call" else Work(work.matmuls, work.flops, work.kernels)
        return Work(other_bytes=_written(program, here, instruction))
    if opcode.endswith(("-start", "-done", "-update")):
        return Work()
    if opcode in ("dot", "convolution"):
        flops = dot_flops if opcode == "dot" else convolution_flops
        return Work(1, flops(here, instruction))
    if opcode in ("ragged-dot", "scaled-dot"):
        return Work(1, None)
    if opcode == "custom-call":
        target = re.search(r'custom_call_target="([^"]*)"', instruction.line)
        if target is None or _MARKS.search(target[1]):
            return Work()
        if _GEMM.search(target[1]):
            return Work(1, _library_flops(here, instruction))
        return Work(kernels=1)
    return Work(other_bytes=_written(program, here, instruction))


def inside(program: hlo.Program, name: str) -> Work:
    """The work of a whole computation."""
    return total(of(program, name, each) for each in program.computations[name].values())


def _one_of(branches: list[Work]) -> Work:
    """The work of a conditional: known where every branch does the same."""
    if len(set(branches)) == 1:
        return branches[0]
    some = any(one.flops != 0 for one in branches)
    return Work(
        max((one.matmuls for one in branches), default=0),
        None if some else 0,
        max((one.kernels for one in branches), default=0),
        None,
    )


def _exchanges(program: hlo.Program, called: Iterable[str]) -> bool:
    """Is there a collective in what is called?"""
    return any(
        programs.is_collective(each)
        for name in called
        for each in program.computations[name].values()
    )


def _written(program: hlo.Program, here: hlo.Computation, instruction: hlo.Instruction) -> int:
    """Bytes that an instruction writes: its results, or the part of one that it updates."""
    within = here
    at = instruction
    if "fusion" in instruction.opcode:
        (name, *_) = [name for _, name in instruction.called()]
        within = program.computations[name]
        at = hlo.root(within)
    if at.opcode == "dynamic-update-slice" and at.operands[1] in within:
        return sum(map(hlo.nbytes, within[at.operands[1]].arrays))
    arrays = instruction.arrays
    if instruction.opcode.endswith("-start"):  # its operands and a state stand in its type too
        arrays = at.arrays
    return sum(map(hlo.nbytes, arrays))


def dot_flops(here: hlo.Computation, dot: hlo.Instruction) -> int | None:
    """2 for each number of the product and each term of its sum."""
    left = here.get(dot.operands[0])
    contracted = hlo.numbers("lhs_contracting_dims", dot.attributes)
    if left is None or len(left.arrays) != 1 or len(dot.arrays) != 1:
        return None
    shape = left.arrays[0][1]
    terms = math.prod(shape[d] for d in contracted or ())
    return 2 * math.prod(dot.arrays[0][1]) * terms


def _library_flops(here: hlo.Computation, call: hlo.Instruction) -> int | None:
    """Of a matmul that a library does, whose configuration says what it contracts."""
    text = call.line.replace("\\", "")
    found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', text)
    left = here.get(call.operands[0]) if call.operands else None
    if found is None or left is None or not left.arrays or not call.arrays:
        return None
    shape = left.arrays[0][1]
    terms = math.prod(shape[int(d)] for d in re.findall(r"\d+", found[1]))
    return 2 * math.prod(call.arrays[0][1]) * terms  # the first result; a scratch space follows


def convolution_flops(here: hlo.Computation, convolution: hlo.Instruction) -> int | None:
    """Of a convolution, which is how XLA for TPU writes a matmul.

    As XLA counts them: 2 for each pair of an output and a kernel position that falls on a number
    of the input, and not on padding or between dilated numbers, times batch, input features and
    output features (HloCostAnalysis::HandleConvolution,
    https://github.com/openxla/xla/blob/main/xla/service/hlo_cost_analysis.cc).
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes)
    if labels is None or any(name not in here for name in convolution.operands[:2]):
        return None
    (_, lhs), (_, rhs) = (here[name].arrays[0] for name in convolution.operands[:2])
    (_, out) = convolution.arrays[0]
    groups = [
        (hlo.numbers(f"{what}_group_count", convolution.attributes) or [1])[0]
        for what in ("feature", "batch")
    ]
    batch, features = lhs[labels[1].index("b")], lhs[labels[1].index("f")]
    channels = out[labels[3].index("f")]
    fused = 1
    for n, label in enumerate(sorted(filter(str.isdigit, labels[1]))):
        sizes = (
            lhs[labels[1].index(label)],
            rhs[labels[2].index(label)],
            out[labels[3].index(label)],
        )
        fused *= _on_numbers(*sizes, _window(convolution.attributes, n))
    return 2 * (features // groups[0]) * channels * (batch // groups[1]) * fused


def _window(attributes: str, n: int) -> dict[str, int]:
    """Stride, padding before and dilations of the nth dimension of a convolution's window."""
    found = re.search(r"window=\{([^}]*)\}", attributes)
    parts = dict(part.split("=") for part in found[1].split()) if found else {}
    nth = {key: value.split("x")[n] for key, value in parts.items()}
    return {
        "stride": int(nth.get("stride", 1)),
        "before": int(nth.get("pad", "0_0").split("_")[0]),
        "lhs_dilate": int(nth.get("lhs_dilate", 1)),
        "rhs_dilate": int(nth.get("rhs_dilate", 1)),
    }


def _on_numbers(size: int, kernel: int, out: int, window: dict[str, int]) -> int:
    """How many pairs of an output and a kernel position fall on a number of the input."""
    at = np.arange(out)[:, None] * window["stride"] - window["before"]
    at = at + np.arange(kernel)[None, :] * window["rhs_dilate"]
    real = (at % window["lhs_dilate"] == 0) & (at >= 0) & (at < size * window["lhs_dilate"])
    return int(real.sum())
