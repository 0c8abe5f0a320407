"""`python -m meshscope`: the commands of this package."""

from __future__ import annotations

import sys

from ._plan_command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
