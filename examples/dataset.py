"""Rows of tokens from files, in one shuffled order for any number of processes.

A text is read byte by byte: 256 tokens, and no tokenizer. Token files are NumPy arrays, `.npy`, of
whole numbers in one dimension, as a tokenizer's ids are stored. All files of a folder are shards of
one data set. The last twentieth of each file is held out, to test with.

The order of rows is fixed by a seed alone. Batch number n has the rows n * size to (n + 1) * size of
that order, and each process reads those that its devices hold. So a position, one number in each
checkpoint, says exactly what was read, whatever the number of processes before and after.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grain  # type: ignore[import-untyped]
import jax
import numpy as np

from endings import Failed
from strategies import ROWS, P, Refused

TEXT = (".txt", ".md")
HELD_OUT = 20  # one row of so many, at the end of each file
FOREVER = 1 << 40  # batches


class Shard(NamedTuple):
    """Some rows of a file: row r has the tokens r * S to (r + 1) * S, and one more to predict."""

    path: Path
    tokens: np.ndarray  # mapped, not read
    first: int
    rows: int


class Tokens:
    """All rows of some shards, for Grain: `len(rows)`, `rows[number]`."""

    def __init__(self, shards: list[Shard], S: int, V: int):
        self.shards, self.S, self.V = shards, S, V
        self.ends = np.cumsum([shard.rows for shard in shards])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, number: Any) -> np.ndarray:
        """The S + 1 tokens of a row, int32."""
        which = int(np.searchsorted(self.ends, number, side="right"))
        shard = self.shards[which]
        row = int(number) - int(self.ends[which]) + shard.rows + shard.first
        tokens = np.asarray(shard.tokens[row * self.S : (row + 1) * self.S + 1], "int32")
        if (largest := tokens.max()) >= self.V:
            raise Failed(
                f"{shard.path} has the token {largest} in row {row}, and --V is {self.V}: start "
                "over with a larger --V, or with the files of another tokenizer"
            )
        return tokens


def open_file(path: Path, V: int) -> np.ndarray:
    """The tokens of a file, mapped into memory."""
    try:
        if path.suffix in TEXT:
            tokens = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, "uint8")
        else:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise Refused(f"--text {path} cannot be read ({error})") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise Refused(
            f"{path} has {tokens.ndim} dimensions of {tokens.dtype}: token files have one, of "
            "whole numbers"
        )
    if path.suffix in TEXT and V < 256:
        raise Refused(f"{path} is read as bytes, and --V is {V}: use --V 256")
    return tokens


def open_tokens(where: str, S: int, V: int) -> tuple[Tokens, Tokens, str]:
    """Rows to train with, rows to test with, and what a checkpoint notes of the data."""
    path = Path(where)
    found = sorted(path.iterdir()) if path.is_dir() else [path]
    files = [file for file in found if file.suffix in (*TEXT, ".npy")]
    if not path.exists() or not files:
        what = "does not exist" if not path.exists() else "has no file that can be read"
        raise Refused(f"--text {where} {what}: give a file or a folder of .txt, .md or .npy files")
    training, test, total = [], [], 0
    for file in files:
        tokens = open_file(file, V)
        total += len(tokens)
        rows = max(len(tokens) - 1, 0) // S
        held_out = -(-rows // HELD_OUT) if rows > 1 else 0
        if rows:
            training.append(Shard(file, tokens, 0, rows - held_out))
        if held_out:
            test.append(Shard(file, tokens, rows - held_out, held_out))
    if not test:
        raise Refused(
            f"--text {where} has {total} tokens, fewer than two rows of --S {S} in each file: use "
            "a smaller --S, or more text"
        )
    return Tokens(training, S, V), Tokens(test, S, V), f"{path.name} of {total} tokens"


def shuffled(rows: Tokens, seed: int) -> grain.MapDataset:
    """Endless: each epoch has every row once, in an order of its own."""
    # Grain shuffles epoch e by seed + e, so the second epoch of one seed is the first of the next.
    far_apart = int(np.random.SeedSequence(seed).generate_state(1)[0])
    return grain.MapDataset.source(rows).shuffle(seed=far_apart).repeat()


def rows_here(sharding: jax.NamedSharding, count: int) -> np.ndarray:
    """Which of `count` rows this process's devices hold, in order."""
    indices = sharding.addressable_devices_indices_map((count,)).values()
    return np.unique([np.arange(count)[index] for index in indices])


class Share:
    """The rows that this process reads, one after another, for Grain."""

    def __init__(self, order: Any, here: np.ndarray, size: int, position: int):
        self.order, self.here, self.size, self.position = order, here, size, position

    def __len__(self) -> int:
        return FOREVER * len(self.here)

    def __getitem__(self, number: Any) -> np.ndarray:
        batch, row = divmod(int(number), len(self.here))
        return self.order[self.position + batch * self.size + int(self.here[row])]


def batches(
    order: Any, size: int, mesh: jax.sharding.Mesh, position: int
) -> Iterator[tuple[jax.Array, int]]:
    """Endless batches of `size` rows, split over the mesh, each with the position after it.

    Threads read ahead. The host's arrays are new each time: a buffer that is used again may change
    a batch that is still on its way to the devices.
    """
    sharding = jax.NamedSharding(mesh, P(ROWS))
    here = rows_here(sharding, size)
    source = grain.MapDataset.source(Share(order, here, size, position)).batch(len(here))
    ahead = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    for tokens_BS in source.to_iter_dataset(ahead):
        position += size
        yield placed(tokens_BS, size, sharding), position


def placed(rows: np.ndarray, size: int, sharding: jax.NamedSharding) -> jax.Array:
    """This process's rows as a part of a global array, whose size is said outright."""
    return jax.make_array_from_process_local_data(sharding, rows, (size, *rows.shape[1:]))
