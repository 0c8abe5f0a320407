"""meshscope's docstrings, which are written to be read in a terminal, as reStructuredText.

`name` in single backticks becomes code, and rows of names with their descriptions beside them,

    compiled   what `.compile()` returns,
               or the text of a program

become definition lists. Examples (`>>>`) stay as they are, up to the next empty line.
"""

import re
import typing
from collections.abc import Iterator
from typing import Any

from sphinx.application import Sphinx

import meshscope

ROW = re.compile(r"(?P<name>\*{0,2}\w+(?:, \*{0,2}\w+)*) {2,}(?P<text>\S.*)")


def as_rst(lines: list[str]) -> Iterator[str]:
    in_row = in_example = False
    before = ""
    for line in lines:
        in_example = bool(line.strip()) and (in_example or line.lstrip().startswith(">>> "))
        row = None if in_example else ROW.fullmatch(line)
        if in_example:
            in_row = False
            yield line
        elif row and (in_row or not before.strip()):
            if in_row:
                yield ""
            in_row = True
            yield f"``{row['name']}``"
            yield f"    {code(row['text'])}"
        elif in_row and line.startswith(" "):
            yield f"    {code(line.strip())}"
        else:
            if in_row and line.strip():
                yield ""
            in_row = in_row and not line.strip()
            yield code(line)
        before = line


def code(text: str) -> str:
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
