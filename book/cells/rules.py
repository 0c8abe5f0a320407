# @title Rules: six names, a row for each
from dataclasses import dataclass

Axis = str | tuple[str, ...] | None  # a tuple: several mesh axes together

@dataclass(frozen=True)
class Rules(AxisRules):
    """Which mesh axis shards which dimension of the model; None leaves it whole."""
    batch: Axis = None  # B, examples
    embed: Axis = None  # D, the width of the model
    hidden: Axis = None  # F, inside an MLP
    heads: Axis = None  # H, of attention
    head_size: Axis = None  # C, features of one head
    vocab: Axis = None  # V, possible answers: here digits, padded to 16
