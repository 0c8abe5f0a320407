"""Run examples/train.py once for each strategy, in folders of that name below --checkpoints."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import train
from model import STRATEGIES

arguments = sys.argv[1:]
folder = train.parse(arguments).checkpoints
for strategy in STRATEGIES:
    own = ["--strategy", strategy, "--checkpoints", f"{folder}/{strategy}"]
    assert train.main([*arguments, *own]) == train.FINISHED
