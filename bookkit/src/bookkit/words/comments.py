"""Comments and docstrings in code cells, replaced by their translations; the code stays as it is.

A run of comment lines is one message, of as many lines; so is each comment at a line's end, the
name of a form, `# @title NAME`, and a docstring of one line. Other strings are code and stay.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

FORM = re.compile(r"#\s*@title\s+")
QUOTES = '"""'
FUNCTIONS_AND_CLASSES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FOR_TOOLS = re.compile(r"#\s*(?:type:|noqa\b|fmt:|ruff:|mypy:|pragma:|@|%%)|#!")


@dataclass(frozen=True)
class Comment:
    """A comment of the lines first to last (from 0), which start with `prefix` at `column`."""

    text: str
    prefix: str  # "# ", "# @title " or the quotes of a docstring
    first: int
    last: int
    column: int


def comments(code: str) -> Iterator[Comment]:
    """Those of a cell, in order. A cell that is not Python, on purpose, has none."""
    lines = code.split("\n")
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(code).readline))
    except (tokenize.TokenError, SyntaxError):
        return
    found: list[Comment] = []
    for token in tokens:
        if token.type != tokenize.COMMENT:
            continue
        row, column = token.start[0] - 1, token.start[1]
        form = FORM.match(token.string)
        if not form and FOR_TOOLS.match(token.string):
            continue
        prefix = form[0] if form else "# "
        text = token.string[len(prefix) :] if form else token.string[1:].removeprefix(" ")
        alone = not lines[row][:column].strip()
        last = found[-1] if found else None
        if (
            last
            and alone
            and not form
            and last.prefix == "# "
            and (last.last, last.column) == (row - 1, column)
            and not lines[last.first][:column].strip()
        ):
            found[-1] = Comment(f"{last.text}\n{text}", "# ", last.first, row, column)
        else:
            found.append(Comment(text, prefix, row, row, column))
    found += docstrings(code)
    yield from sorted((one for one in found if one.text.strip()), key=lambda one: one.first)


def docstrings(code: str) -> Iterator[Comment]:
    """Those that are a line of their own, without escapes."""
    try:
        tree = ast.parse(code)
    except SyntaxError:  # such as the lines of IPython that begin with %
        return
    lines = code.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS_AND_CLASSES):
            text, row = ast.get_docstring(node, clean=False), node.body[0].lineno - 1
            if lines[row].strip() == f"{QUOTES}{text}{QUOTES}":
                yield Comment(text or "", QUOTES, row, row, node.body[0].col_offset)


def with_comments(code: str, messages: Mapping[str, str]) -> str:
    """The cell with each comment and docstring that has a translation replaced."""
    lines = code.split("\n")
    for comment in reversed(list(comments(code))):
        new = messages.get(comment.text)
        if not new or new == comment.text:
            continue
        before = lines[comment.first][: comment.column]
        alone = not before.strip() and comment.prefix == "# "
        parts = new.split("\n") if alone else [" ".join(new.split("\n"))]
        end = QUOTES if comment.prefix == QUOTES else ""
        replaced = [f"{before}{comment.prefix}{part}{end}".rstrip() for part in parts]
        lines[comment.first : comment.last + 1] = replaced
    return "\n".join(lines)
