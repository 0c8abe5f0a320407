"""Bytes told over two real processes, against those that one process sees of the same trees."""

import contextlib
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import tempfile

import pytest
import tied


def free_port(tries=100):
    """One that nobody listens at, below those that systems give out on their own."""
    for port in random.sample(range(20_000, 26_000), tries):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no free port")


@pytest.fixture(scope="module")
def told():
    """What each of two processes of four devices says."""
    mine = {
        key: value
        for key, value in os.environ.items()
        if key not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    }
    command = [sys.executable, tied.__file__]
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        processes, said = [], [pathlib.Path(folder, f"{number}.txt") for number in range(2)]
        for number, path in enumerate(said):
            file = stack.enter_context(path.open("w"))  # a pipe that nobody empties would stop it
            process = subprocess.Popen(
                [*command, str(number), address],
                env={**mine, "NPROC": "16"},
                stdout=file,
                stderr=file,
            )
            stack.callback(process.kill)
            processes.append(process)
        for process, path in zip(processes, said):
            assert process.wait(240) == 0, path.read_text()[-3000:]
        answers = [
            [line for line in path.read_text().splitlines() if line.startswith('{"trees"')]
            for path in said
        ]
    return [json.loads(lines[-1]) for lines in answers]


def test_a_tied_array_counts_once_over_processes(told):
    """8 x 16 numbers in float32: 512 bytes in two pieces, each on four of eight devices."""
    for answer in told:
        for name in (
            "one",
            "twice",
            "other arrays of the same buffers",
            "placed again where it is",
        ):
            assert answer["trees"][name][:3] == [256, 512, 2048], name
        assert answer["trees"]["two of the same shape"][:3] == [512, 1024, 4096]


def test_every_tree_has_the_bytes_that_one_process_counts(told):
    """Addresses of all eight devices are known to one process, and of four to each of two."""
    here = {name: tied.measured(tree) for name, tree in tied.trees(tied.grid()).items()}
    assert told[0]["trees"] == told[1]["trees"] == here


def test_tied_weights_of_a_model_count_once_over_processes(told):
    table, kernel, bias = 64 * 16 * 4, 16 * 16 * 4, 16 * 4
    for answer in told:
        for name in ("a model with tied weights", "its state", "its state and itself"):
            assert answer["trees"][name][0] == table // 2 + kernel + bias, name
            assert answer["trees"][name][2] == 4 * table + 8 * (kernel + bias)


def test_only_what_is_known_to_be_shared_is_left_out(told):
    """A part of the pieces, or an array of the other process alone."""
    for answer in told:
        # 4 pieces of 64 bytes that two arrays share here, and 4 with the other process.
        assert answer["parts"]["half of its pieces"] == [64, 512, 512]
        # 4 copies of 256 bytes likewise; every number is on a device that was counted.
        assert answer["parts"]["half of its copies"] == [256, 256, 2048]
        assert answer["parts"]["elsewhere, twice"] == [64, 256, 256]
        assert answer["parts"]["elsewhere, two arrays"] == [128, 512, 512]
