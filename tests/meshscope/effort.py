"""How many random examples a property is tried on."""

import os

# The search for planted faults (tools/meshscope_mutants.py) runs every test hundreds of times.
FEWER = int(os.environ.get("MESHSCOPE_FEWER_EXAMPLES", "1"))


def examples(number):
    return max(3, number // FEWER)
