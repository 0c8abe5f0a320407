"""Read and write directories of safetensors files, the form in which Hugging Face publishes models.

A file is eight bytes with the length of its header, a header in JSON, and the bytes of the tensors,
row by row and little-endian (https://github.com/huggingface/safetensors#format). Reading one cannot
run code. That is not true of the pickles in .bin and .pt files, so this module never opens them.
"""

import json
import math
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2, "I16": np.int16, "U16": np.uint16, "F16": np.float16,
    "BF16": jnp.bfloat16, "I32": np.int32, "U32": np.uint32, "F32": np.float32,
    "I64": np.int64, "U64": np.uint64, "F64": np.float64,
}  # fmt: skip
NAMES_OF_DTYPES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
COPIED = (
    ".json",
    ".txt",
    ".model",
    ".jinja",
    ".md",
)  # beside the weights: configuration, tokenizer


class BadWeights(ValueError):
    """What is wrong with a directory of weights, and what to do about it, in one sentence."""


class Entry(NamedTuple):
    """Where one tensor is."""

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int  # the offset of its first byte in the file

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# ---- what a directory holds -----------------------------------------------------------------


def read_header(path: Path) -> dict[str, Entry]:
    """Return the tensors of one file by name, in the order of their bytes.

    Raises BadWeights if the file is missing, truncated, or not what the format allows.
    """
    if not path.is_file():
        raise BadWeights(f"{path} is missing: download it again")
    with open(path, "rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER:
            raise BadWeights(
                f"{path} says that its header has {length:,} bytes, more than the format allows "
                f"({MAX_HEADER:,}): it is damaged or no safetensors file"
            )
        if size < 8 + length:
            raise BadWeights(
                f"{path} is truncated: it has {size:,} bytes and its header alone needs "
                f"{8 + length:,}; download it again"
            )
        header = parse_json(path, file.read(length))
    header.pop("__metadata__", None)
    found = [entry_of(path, name, info, 8 + length) for name, info in header.items()]
    entries = dict(sorted(found, key=lambda item: (item[1].begin, item[1].nbytes)))
    end = 8 + length
    for name, entry in entries.items():
        if entry.begin != end:
            raise BadWeights(f"{path}: {name} overlaps another tensor or leaves a gap before it")
        end += entry.nbytes
    if size != end:
        what = "is truncated" if size < end else "has bytes that belong to no tensor"
        raise BadWeights(
            f"{path} {what}: its header describes {end:,} bytes and it has {size:,}; "
            "download it again"
        )
    return entries


def parse_json(path: Path, text: bytes) -> dict[str, Any]:
    """Return a JSON object in which no key is there twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key is there twice")
        return dict(pairs)

    try:
        value = json.loads(text.decode(), object_pairs_hook=once)
        if not isinstance(value, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise BadWeights(f"{path} has no valid JSON ({error}): download it again") from error
    return value


def entry_of(path: Path, name: str, info: Any, start: int) -> tuple[str, Entry]:
    """Return the entry that one item of a header describes; offsets in a header begin at `start`."""
    try:
        dtype, shape, (begin, end) = info["dtype"], info["shape"], info["data_offsets"]
        numbers = [*shape, begin, end]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError
    except (KeyError, TypeError, ValueError) as error:
        raise BadWeights(f"{path}: {name} has no valid dtype, shape and data_offsets") from error
    if dtype not in DTYPES:
        raise BadWeights(f"{path}: {name} has dtype {dtype}, which is not supported here")
    entry = Entry(path, np.dtype(DTYPES[dtype]), tuple(shape), start + begin)
    if entry.nbytes != end - begin:
        raise BadWeights(
            f"{path}: {name} has shape {entry.shape} and dtype {dtype}, which is "
            f"{entry.nbytes:,} bytes, but data_offsets give it {end - begin:,}"
        )
    return name, entry


def open_directory(folder: Path) -> dict[str, Entry]:
    """Return all tensors of a model by name: of one file, or of those that the index lists.

    Only headers are read. Raises BadWeights if the index and the files disagree.
    """
    index, single = folder / INDEX, folder / SINGLE
    if index.exists() and single.exists():
        raise BadWeights(f"{folder} has both {INDEX} and {SINGLE}: remove the one that is stale")
    if single.exists():
        return read_header(single)
    if not index.exists():
        raise BadWeights(f"{folder} has neither {SINGLE} nor {INDEX}: is it a model's directory?")
    listed = parse_json(index, index.read_bytes()).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise BadWeights(f"{index} has no weight_map: download it again")
    for name, file in listed.items():
        if not isinstance(file, str) or Path(file).name != file or "\\" in file:
            raise BadWeights(f"{index} says {name} is in {file!r}, which is not in this directory")
        if not file.endswith(".safetensors"):
            raise BadWeights(f"{index} says {name} is in {file}: only .safetensors is ever opened")
    entries: dict[str, Entry] = {}
    for file in sorted(set(listed.values())):
        for name, entry in read_header(folder / file).items():
            if listed.get(name) != file:
                raise BadWeights(f"{file} has {name}, but the index does not say so")
            entries[name] = entry
    for name in listed.keys() - entries.keys():
        raise BadWeights(f"{index} says {name} is in {listed[name]}, but that file lacks it")
    return entries


# ---- reading ----------------------------------------------------------------------------------


def reader_of_orbax() -> bool:
    """Whether this Orbax reads safetensors by the target's sharding (since 0.12.2, experimental)."""
    return hasattr(ocp.options, "SafetensorsOptions")


def read(
    entries: Mapping[str, Entry],
    targets: Mapping[str, jax.ShapeDtypeStruct],
    with_orbax: bool | None = None,
) -> dict[str, jax.Array]:
    """Read tensors onto devices. Each process reads only what its own devices hold.

    Args:
        entries: what `open_directory` returned.
        targets: by name, the shape and dtype that the tensor must have, and its sharding.
        with_orbax: Orbax's reader, or memory-mapped files; by default Orbax's where it is there.

    Raises BadWeights if a tensor is missing or has another shape or dtype.
    """
    for name, target in targets.items():
        if name not in entries:
            raise BadWeights(f"{name} is missing in the files, but the configuration asks for it")
        entry = entries[name]
        if entry.shape != target.shape:
            raise BadWeights(
                f"{entry.path}: {name} has shape {entry.shape}, but the configuration asks for "
                f"{target.shape}"
            )
        if entry.dtype != target.dtype:
            raise BadWeights(
                f"{entry.path}: {name} is {entry.dtype}, but the configuration says "
                f"{target.dtype}: which of them is right?"
            )
    if reader_of_orbax() if with_orbax is None else with_orbax:
        return read_with_orbax(entries, targets)
    return {name: read_mapped(entries[name], target) for name, target in targets.items()}


def read_with_orbax(
    entries: Mapping[str, Entry], targets: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Read with Orbax, file by file: given a directory, it would also read files not in the index."""
    files: dict[Path, dict[str, jax.ShapeDtypeStruct]] = {}
    for name, target in targets.items():
        files.setdefault(entries[name].path.resolve(), {})[name] = target
    arrays: dict[str, jax.Array] = {}
    context = ocp.Context()
    context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS
    with context:
        for path, wanted in files.items():
            arrays |= ocp.load(path, wanted)
    return arrays


def read_mapped(entry: Entry, target: jax.ShapeDtypeStruct) -> jax.Array:
    """Read one tensor from a memory-mapped file: each device's piece is copied from its pages."""
    tensor = np.memmap(entry.path, entry.dtype, "r", entry.begin, entry.shape)
    return jax.make_array_from_callback(
        entry.shape, target.sharding, lambda piece: np.array(tensor[piece])
    )


# ---- writing ----------------------------------------------------------------------------------


def write_file(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write one file, with tensors in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # which Transformers asks for
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        dtype = NAMES_OF_DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).tobytes())


def write_like(source: Path, out: Path, tensor_of: Callable[[str], np.ndarray]) -> None:
    """Write a directory with the files of `source`, its headers and names, and other values.

    Args:
        tensor_of: returns a tensor by its name; all processes call it, in the same order.

    The files appear under `out` once all of them are whole. Raises BadWeights if `out` is not empty
    or a tensor has another shape or dtype than in `source`.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadWeights(f"{out} is there already and not empty: choose another directory")
    entries = open_directory(source)
    files = {entry.path for entry in entries.values()}
    if jax.process_index() != 0:  # the others only take part in what `tensor_of` communicates
        for path in sorted(files):
            for _ in written(path, None, tensor_of):
                pass
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as unfinished:
        folder = Path(unfinished) / out.name
        folder.mkdir()
        for path in source.iterdir():
            if path.suffix in COPIED and path.is_file():
                shutil.copyfile(path, folder / path.name)
        for path in sorted(files):
            with open(folder / path.name, "wb") as file:
                for _ in written(path, file, tensor_of):
                    pass
        if out.exists():
            out.rmdir()
        folder.rename(out)


def written(
    path: Path, file: BinaryIO | None, tensor_of: Callable[[str], np.ndarray]
) -> Iterator[str]:
    """Write the header of `path`, as it is there, and then each tensor; yield their names."""
    entries = read_header(path)
    if file:
        with open(path, "rb") as source:
            file.write(source.read(min(entry.begin for entry in entries.values())))
    for name, entry in entries.items():
        tensor = tensor_of(name)
        if (tensor.shape, tensor.dtype) != (entry.shape, entry.dtype):
            raise BadWeights(
                f"{name} is {tensor.dtype} of shape {tensor.shape}, and was {entry.dtype} of "
                f"shape {entry.shape}: it cannot be written under that header"
            )
        if file:
            file.write(np.ascontiguousarray(tensor).tobytes())
        yield name
