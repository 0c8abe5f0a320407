"""Element types that programs compiled for CPU send as wider ones.

XLA's CPU compiler converts them before each all-gather, all-reduce, reduce-scatter, all-to-all
and collective-permute, and back afterwards. So such a program sends 2 or 4 times the bytes that
were written. tests/meshscope/test_cpu_types.py measures each type with each collective.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from . import _hlo as hlo
from ._messages import Said, joined

SENT_AS = (  # the first pattern that an HLO element type matches
    ("bf16", "f32"),
    ("f8e8m0fnu", "f32"),
    (r"f[84]\w+", "f16"),
    ("s4", "s8"),
    ("u4", "u8"),
)
# Layouts in tiles, and queues of operations, are in texts for TPU and for GPU alone.
_OTHERS = re.compile(r":T\(|operation_queue_id")


def sent_as(element: str) -> str | None:
    """The element type that CPU sends in place of one; None: it sends the type itself."""
    return next((wide for narrow, wide in SENT_AS if re.fullmatch(narrow, element)), None)


@dataclass(frozen=True)
class Widened:
    """The types of a program that are sent as wider ones, and what to say of them."""

    types: tuple[str, ...] = ()
    message: str = "CPU sends {types}"

    def note(self, sent: Collection[str]) -> Said | None:
        """What to say beside bytes that were ``sent`` as these dtypes; None: nothing."""
        parts = []
        for narrow in self.types:
            wide = sent_as(narrow) or narrow
            if hlo.dtype(wide) in sent and hlo.dtype(narrow) not in sent:
                times = hlo.nbytes((wide, (8,))) // hlo.nbytes((narrow, (8,)))
                names = {"dtype": hlo.dtype(narrow), "wide": hlo.dtype(wide)}
                parts.append(
                    Said("{dtype} as {wide} ({times} times the bytes)", times=times, **names)
                )
        return Said(self.message, types=joined("{part}, {parts}", parts)) if parts else None


def widened(program: hlo.Program, text: str, platform: str | None) -> Widened:
    """The types of a program that is compiled for a platform; None: a text, which names none."""
    if platform not in ("cpu", None) or (platform is None and _OTHERS.search(text)):
        return Widened()
    found = {element for one in program.instructions() for element, _ in one.arrays}
    types = tuple(sorted(filter(sent_as, found)))
    return Widened(types) if platform else Widened(types, "If compiled for CPU, it sends {types}")
