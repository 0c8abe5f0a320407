"""Comments in code cells: found, and replaced by their translations; the code stays as it is.

A run of comment lines is one message, of as many lines; so is each comment at a line's end, and the
name of a form, `# @title NAME`. A # inside a string is none. Docstrings are code and stay.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

FORM = re.compile(r"#\s*@title\s+")
FOR_TOOLS = re.compile(r"#\s*(?:type:|noqa\b|fmt:|ruff:|mypy:|pragma:|@|%%)|#!")


@dataclass(frozen=True)
class Comment:
    """A comment of the lines first to last (from 0), which start with `prefix` at `column`."""

    text: str
    prefix: str  # "# " or "# @title "
    first: int
    last: int
    column: int


def comments(code: str) -> Iterator[Comment]:
    """The comments of a cell, in order. A cell that is no Python, on purpose, has none."""
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
    yield from (comment for comment in found if comment.text.strip())


def with_comments(code: str, messages: Mapping[str, str]) -> str:
    """The cell with each comment that has a translation replaced."""
    lines = code.split("\n")
    for comment in reversed(list(comments(code))):
        new = messages.get(comment.text)
        if not new or new == comment.text:
            continue
        before = lines[comment.first][: comment.column]
        alone = not before.strip() and comment.prefix == "# "
        parts = new.split("\n") if alone else [" ".join(new.split("\n"))]
        replaced = [f"{before}{comment.prefix}{part}".rstrip() for part in parts]
        lines[comment.first : comment.last + 1] = replaced
    return "\n".join(lines)
