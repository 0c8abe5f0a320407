"""Names in prose are real: inline code that names something of a library imports here.

`jax.make_mesh(…)` and `nnx.jit` are looked up, attribute by attribute.
"""

from __future__ import annotations

import pkgutil
import re

from bookkit.lint.markdown import tokens
from bookkit.lint.rules import Findings, Page, rule

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
GONE = {"jax.sharding.PositionalSharding", "jax.sharding.use_mesh"}  # pages say that they are
OLDER = "older-code"  # the page that shows what no longer imports


def imports(name: str) -> bool:
    """Does this dotted name import, attribute by attribute?"""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def name_of_library(span: str) -> str | None:
    """The dotted name, in full, that a piece of inline code begins with, if it is of a library."""
    if found := NAME.fullmatch(span.strip()):
        first, _, rest = found[1].partition(".")
        first = ALIASES.get(first, first)
        if first.split(".")[0] in ROOTS:
            return f"{first}.{rest}"
    return None


@rule
def real_names(page: Page) -> Findings:
    """A name of a library in inline code imports here."""
    for line, token in tokens(page) if page.chapter.name != OLDER else ():
        name = name_of_library(token.content) if token.type == "code_inline" else None
        if name and name not in GONE and not imports(name):
            yield line, f"`{name}` does not import: correct it, or list it in names.py as gone"
