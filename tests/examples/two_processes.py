"""Run examples/train.py as one of several processes: two_processes.py NUMBER COUNT PORT ARGUMENTS…

The program itself is not changed: this only starts JAX's runtime first, as a launcher would.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import jax

import train  # touches no device, or the next line would fail

number, count, port, *arguments = sys.argv[1:]
jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(number))
sys.exit(train.main(arguments))
