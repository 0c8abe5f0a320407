"""Chapter 16's step as it was stored: its meshes, and what the one compiler of each made of it."""

import re

from many_devices.compiled import stored_memory, stored_program

GIB, GB = 2**30, 1e9
MESHES = {  # of each stored program: the mesh, and sequences on each device
    "ahead-v5e-16": (dict(replica=1, data=16, model=1), 16),
    "ahead-v5e-256": (dict(replica=1, data=256, model=1), 256),
    "ahead-v5e-256-hsdp": (dict(replica=16, data=16, model=1), 256),
    "ahead-v5e-256-hsdp4": (dict(replica=4, data=64, model=1), 256),
    "ahead-v5e-256-tensor": (dict(replica=1, data=64, model=4), 256),
    "ahead-v5p-2048": (dict(replica=1, data=2048, model=1), 2048),
    "ahead-v5p-2048-hsdp": (dict(replica=8, data=256, model=1), 2048),
    "ahead-h100-8-large": (dict(replica=1, data=8, model=1), 128),
    "ahead-h100-64": (dict(replica=1, data=64, model=1), 64),
    "ahead-h100-64-inside": (dict(replica=1, data=8, model=8), 64),
    "ahead-h100-64-across": (dict(model=8, replica=1, data=8), 64),
}
TPU = [name for name in MESHES if "h100" not in name]
H100 = [name for name in MESHES if "h100" in name]


def made(name):
    """What the one compiler made of a stored program."""
    entry = stored_program(name)
    return entry["gpu"] if "gpu" in entry else entry["tpu"]


def payload(name, kind, axis, dtype="bfloat16"):
    rows = made(name)["moves"]
    wanted = kind, [axis], dtype
    return sum(row["payload"] for row in rows if (row["kind"], row["axes"], row["dtype"]) == wanted)


def sent(name):
    return sum(row["wire"] for row in made(name)["moves"])


def needs(name):
    """Bytes on each device, on TPU at the peak."""
    return stored_memory(name, "gpu" if "gpu" in stored_program(name) else "tpu").bytes_per_device


def in_message(name):
    """GiB that the compiler counted before it raised an error."""
    found = re.search(r"HLO temporaries \(([\d.]+)G\) exceeds", made(name)["refused"])
    return float(found[1])
