"""The one normaliser: what is published and what is compared has passed through here.

It shortens two things that differ from run to run or from machine to machine, and nothing else:

- the temporary file that a kernel makes up for each cell,
  `/tmp/ipykernel_4711/1234567.py`, becomes `cell.py`;
- the folder that packages are installed in, `/home/me/.venv/lib/python3.12/site-packages/jax/…`,
  becomes `jax/…`; and so does a package installed from its source, `…/src/meshscope/…`.
"""

from __future__ import annotations

import re
from typing import Any

from nbformat import NotebookNode

# One folder of a path: no white space, quotes, brackets, colons, commas or colour codes.
_FOLDER = r"[^\s/\\\"'<>():|,;=\x1b]+"
_START = r"(?:~|[A-Za-z]:)?[/\\]"
_CELL_FILE = re.compile(rf"{_START}(?:{_FOLDER}[/\\])*?ipykernel_\d+[/\\]\d+\.py")
_PACKAGES = re.compile(
    rf"{_START}(?:{_FOLDER}[/\\])*?(?:(?:site|dist)-packages[/\\]|src[/\\](?=meshscope\b))"
)


def normalise_text(text: str) -> str:
    return _PACKAGES.sub("", _CELL_FILE.sub("cell.py", text))


def _normalise(value: Any) -> Any:
    if isinstance(value, str):
        return normalise_text(value)
    if isinstance(value, list):
        return [_normalise(item) for item in value]
    if isinstance(value, dict):
        return type(value)({key: _normalise(item) for key, item in value.items()})
    return value


def normalise(notebook: NotebookNode) -> NotebookNode:
    """Normalise the outputs of an executed notebook, in place, and return it."""
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        for output in cell.outputs:
            for key in ("text", "traceback", "evalue"):  # streams and errors
                if key in output:
                    output[key] = _normalise(output[key])
            data = output.get("data", {})  # results, by MIME type; pictures are left alone
            for mime in data:
                if not mime.startswith("image/") or mime == "image/svg+xml":
                    data[mime] = _normalise(data[mime])
    return notebook
