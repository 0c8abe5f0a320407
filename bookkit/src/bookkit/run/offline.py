"""Execute every chapter again without a network and compare with what is published.

    bookkit offline                    all chapters
    bookkit offline book/01-mesh       one

The kernels run in a network namespace of their own (`unshare -rn`) in which only the loopback is up,
since kernels talk through it, and with an empty HOME. The same code must give the same outputs, but
for cells tagged `timing`. The first cell that differs is printed. Where namespaces are forbidden the
pass fails and says so: nothing was shown.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from bookkit.model.book import Book, Problem

NEEDS = (
    "The network-cut pass could not be made: `unshare -rn` failed here ({why}). It needs Linux with "
    "unprivileged user namespaces (`sysctl kernel.unprivileged_userns_clone=1`, on Ubuntu 24.04 "
    "`kernel.apparmor_restrict_unprivileged_userns=0`). Nothing was checked, so this is a failure."
)


def loopback_up() -> None:
    """Bring up `lo` of this namespace (kernels need it) without needing the `ip` command."""
    if sys.platform == "win32":
        raise Problem(NEEDS.format(why="this is Windows"))
    import fcntl

    get_flags, set_flags, up = 0x8913, 0x8914, 0x1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        asked = fcntl.ioctl(probe, get_flags, struct.pack("16sh14x", b"lo", 0))
        flags = struct.unpack_from("16sh", asked)[1]
        fcntl.ioctl(probe, set_flags, struct.pack("16sh14x", b"lo", flags | up))


def prove_cut() -> None:
    """The loopback answers and nothing else does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()
    names = sorted(name for _, name in socket.if_nameindex())
    if names != ["lo"]:
        raise Problem(f"the network is not cut: there are the interfaces {', '.join(names)}")
    try:
        socket.create_connection(("192.0.2.1", 80), timeout=2).close()
    except OSError:
        return
    raise Problem("the network is not cut: a connection to the outside succeeded")


def execute_inside(pages: list[str], out: Path) -> None:
    """What runs in the namespace: execute anew into `out`."""
    loopback_up()
    prove_cut()
    from bookkit.run.execute import main

    main([*pages, "--fresh", "--out", str(out)])


def execute_cut(pages: list[str], out: Path) -> None:
    if shutil.which("unshare") is None:
        raise Problem(NEEDS.format(why="there is no `unshare` command"))
    possible = subprocess.run(["unshare", "-rn", "true"], capture_output=True, text=True)
    if possible.returncode:
        raise Problem(NEEDS.format(why=possible.stderr.strip() or f"status {possible.returncode}"))
    with tempfile.TemporaryDirectory(prefix="book-home-") as home:
        command = ["unshare", "-rn", sys.executable, "-m", "bookkit", "offline"]
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("XDG_") and "proxy" not in name.lower()
        }
        done = subprocess.run(
            [*command, "--inside", str(out), *pages],
            cwd=Book().root,
            env={**environment, "HOME": home},
        )
    if done.returncode:
        raise Problem("without a network a chapter fails; see above")


def comparable(output: NotebookNode) -> dict:
    """An output without what counts executions."""
    return {
        key: value for key, value in output.items() if key not in ("execution_count", "metadata")
    }


def first_difference(page: str, one: NotebookNode, two: NotebookNode) -> str | None:
    """Which cell of two executions shows something else first; None when they agree."""
    if len(one.cells) != len(two.cells):
        return f"{page}.md: {len(one.cells)} cells the first time, {len(two.cells)} the second"
    for number, (before, after) in enumerate(zip(one.cells, two.cells), 1):
        if before.cell_type != "code" or "timing" in before.metadata.get("tags", []):
            continue
        left = [comparable(output) for output in before.outputs]
        right = [comparable(output) for output in after.outputs]
        if left != right:
            lines = difflib.unified_diff(
                text_of(left), text_of(right), "published", "second run", lineterm="", n=1
            )
            return (
                f"{page}.md, cell {number} shows something else on a second run:\n    "
                + "\n    ".join(line[:160] for line in list(lines)[:20])
                + "\nFix seeds, sort, or print less; a cell that measures time is tagged timing."
            )
    return None


def text_of(outputs: list[dict]) -> list[str]:
    lines = []
    for output in outputs:
        for key, value in sorted(output.items()):
            parts = value.items() if isinstance(value, dict) else [(key, value)]
            for name, text in parts:
                text = "\n".join(text) if isinstance(text, list) else str(text)
                lines += [f"{name}: {line}" for line in text.splitlines()]
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bookkit offline", description=__doc__.split("\n")[0])
    parser.add_argument(
        "pages", nargs="*", metavar="PAGE", help="such as book/01-mesh; default: all"
    )
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        return execute_inside(options.pages, options.inside)
    from bookkit.run.execute import execute

    if sys.platform != "linux":
        raise Problem(NEEDS.format(why="this is not Linux"))
    book = Book()
    pages = options.pages or book.chapters
    first = execute(book, pages)
    with tempfile.TemporaryDirectory(prefix="book-offline-") as folder:
        execute_cut(pages, Path(folder))
        second = {
            page: nbformat.read(Path(folder, f"{Path(page).name}.ipynb"), 4) for page in pages
        }
    problems = [
        text for page in pages if (text := first_difference(page, first[page], second[page]))
    ]
    if problems:
        raise Problem("\n\n".join(problems))
    print(f"{len(pages)} chapters: the same outputs without a network")
