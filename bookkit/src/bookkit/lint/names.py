"""Names in prose are real: inline code that names something of a library imports here.

`jax.make_mesh(…)` and `nnx.jit` are looked up, attribute by attribute.
"""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any

from bookkit.lint.prose import code_spans
from bookkit.lint.rules import CHAPTER, PAGE, REFERENCE, Page, Said, rule

ALIASES = {
    "jnp": "jax.numpy",
    "np": "numpy",
    "nnx": "flax.nnx",
    "nn": "flax.linen",
    "ms": "meshscope",
    "ocp": "orbax.checkpoint.v1",
    "lax": "jax.lax",
    "plt": "matplotlib.pyplot",
}
ROOTS = "jax jaxlib flax optax orbax numpy meshscope matplotlib".split()
NAME = re.compile(r"@?([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(.*\)|\[.*\])?", re.S)
GONE = {"jax.sharding.PositionalSharding", "jax.sharding.use_mesh"}  # other pages name these too
OLDER = "older-code"


@functools.cache
def imports(name: str) -> bool:
    """Does this dotted name import, attribute by attribute?"""
    first, *rest = name.split(".")
    parts = ALIASES.get(first, first).split(".") + rest
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            try:
                found = getattr(found, part)
            except AttributeError:
                return part == parts[-1] and part in getattr(found, "__annotations__", {})
        return True
    return False


def name_of_library(span: str) -> str | None:
    """The dotted name that a piece of inline code begins with, if it is one of a library."""
    found = NAME.fullmatch(span.strip())
    first = found[1].split(".")[0] if found else ""
    return found[1] if found and ALIASES.get(first, first).split(".")[0] in ROOTS else None


@rule(CHAPTER, PAGE, REFERENCE)
def real_names(page: Page) -> Said:
    """A name of a library in inline code imports here; the page of older code shows what does not."""
    if page.chapter.name == OLDER:
        return
    for cell in page.chapter.markdown:
        for span in dict.fromkeys(code_spans(cell.source)):
            name = name_of_library(span)
            if name and name not in GONE and not imports(name):
                at = cell.source.find(f"`{span}`")
                line = cell.line + cell.source.count("\n", 0, max(at, 0))
                yield line, f"`{name}` does not import: correct it, or list it in names.py as gone"
