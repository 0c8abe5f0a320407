"""meshscope's docstrings, which are written to be read in a terminal, as reStructuredText.

`name` in single backticks becomes code; examples (`>>> …`) and the rest stay, and Napoleon reads them.
"""

import re
import typing
from collections.abc import Iterator
from typing import Any

from sphinx.application import Sphinx

import meshscope


def as_rst(lines: list[str]) -> Iterator[str]:
    example = False
    for line in lines:
        example = bool(line.strip()) and (example or line.lstrip().startswith(">>>"))
        yield line if example else mark_code(line)


def mark_code(text: str) -> str:
    """Single backticks mark code; a star or an underscore outside code is only itself."""
    pieces = re.split(r"(`+[^`]+`+)", text)
    plain = [re.sub(r"([*|]|_(?=\W|$))", r"\\\1", piece) for piece in pieces[::2]]
    marked = [f"``{piece.strip('`')}``" for piece in pieces[1::2]]
    return "".join(a + b for a, b in zip(plain, [*marked, ""], strict=True))


def docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = list(as_rst(lines))


def signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, arguments: str, returns: str
) -> tuple[str, None] | None:
    """Classes here are results, not made by readers: no constructor's signature."""
    return ("", None) if what == "class" else None


def public_names(app: Sphinx) -> None:
    """Let signatures name the classes of meshscope as this page does, by the package.

    A module is private here; `meshscope.Memory` is what readers import, and what links lead to.
    """
    for name in meshscope.__all__:
        if isinstance(found := getattr(meshscope, name), type):
            # Annotations are looked up in the module of the class: now, while it is known.
            if found.__module__ != meshscope.__name__ and "__annotations__" in vars(found):
                found.__annotations__ = typing.get_type_hints(found)
            found.__module__ = meshscope.__name__


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", public_names)
    app.connect("autodoc-process-docstring", docstring, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", signature)
