"""How many random examples a property is tried on."""

import os

# `make mutants-meshscope` runs every test for hundreds of planted faults.
FEWER = int(os.environ.get("MESHSCOPE_FEWER_EXAMPLES", "1"))


def examples(number):
    return max(3, number // FEWER)
