"""examples/compile_ahead.py: what it says without a compiler is what chapter 16 stored."""

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax

from defined import program_at
from many_devices import compiled, llama_step
from many_devices.compiled import stored_program

FILE = Path(__file__).parents[2] / "examples" / "compile_ahead.py"


def run(*arguments):
    command = [sys.executable, FILE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def numbers(done):
    assert done.returncode == 0, done.stderr
    found = re.findall(r"(?m)^([\d,]+) bytes of (.+)$", done.stdout)
    return {what: int(size.replace(",", "")) for size, what in found}


def test_without_a_compiler_it_says_what_the_compiler_for_h100_found():
    """State and batch, gathers, scatters and sums, to the byte."""
    found = numbers(run("h100:64", "--data=8", "--model=8", "--without-compiler"))
    stored = stored_program("ahead-h100-64-inside")["gpu"]
    moves = {
        f"{row['kind']} {row['axes'][0]}": row["payload"]
        for row in stored["moves"]
        if row["dtype"] == "bfloat16"
    }
    assert list(found.values()) == [
        stored["memory"]["arguments"],
        moves["all-gather data"],
        moves["reduce-scatter data"],
        moves["all-reduce model"],
    ]


def test_a_name_that_nothing_has_ends_it():
    """Offload moves something to the host, or the program says that the name is wrong."""
    asked = ("v5e:4x4", "--data=16", "--without-compiler")
    right = run(*asked, "--offload=layer_input")
    assert right.returncode == 0 and "1 moves to the host" in right.stdout
    wrong = run(*asked, "--offload=layer_inputs")
    assert wrong.returncode == 1 and "nothing is offloaded" in wrong.stderr


def test_an_unknown_machine_is_named():
    done = run("v9:4x4", "--data=16")
    assert done.returncode == 2 and "name a machine such as v5e:4x4" in done.stderr


def test_its_step_is_that_of_the_chapter():
    """Lowered for TPU, with FSDP, tensor parallelism and HSDP, the two are one program."""
    with mock.patch.dict(os.environ):
        example = program_at(FILE)
    sizes = dict(replica=2, data=4, model=2)
    mesh, config = example.abstract_mesh(sizes), example.Config(L=2)
    both = [module.step_on(mesh, config, B=8, S=16) for module in (example, llama_step)]
    assert jax.tree.leaves(both[0][1:]) == jax.tree.leaves(both[1][1:])
    digests = {compiled.digest(compiled.lowered_for("tpu", *program)) for program in both}
    assert len(digests) == 1
