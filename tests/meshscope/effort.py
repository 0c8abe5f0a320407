"""How many random examples a property is tried on."""

import os

# mutmut runs the tests for hundreds of planted faults.
FEWER = int(os.environ.get("MESHSCOPE_FEWER_EXAMPLES", "1"))


def examples(number):
    return max(3, number // FEWER)
