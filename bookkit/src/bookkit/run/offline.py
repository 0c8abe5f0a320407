"""Execute every chapter again without a network and compare with what is published.

    bookkit offline                        all chapters
    bookkit offline book/01-mesh           one
    bookkit offline --seconds 120 --seed 7     a seeded sample that should end in time

The kernels run in a network namespace of their own (`unshare -rn`) in which only the loopback is up,
since kernels talk through it, and with an empty HOME. Proofs are left out, since what a reader reads
must do without them, and so are the calls that a reader could make (calls.py). The same code must give
the same outputs, but for cells tagged `timing`. Where namespaces are forbidden the pass fails and says
so: nothing was shown.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import nbformat

from bookkit.model.book import Book, Problem
from bookkit.run.calls import without_proofs
from bookkit.run.compare import differences
from bookkit.run.execute import (
    execute,
    execute_notebooks,
    read_as_sphinx,
    seconds_of_cells,
    write_notebooks,
)

STARTING = 5  # seconds of a kernel and its imports
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


def execute_cut(book: Book, pages: Sequence[str], out: Path) -> None:
    """Execute pages anew into `out`, in a process whose network is cut."""
    if sys.platform != "linux" or not shutil.which("unshare"):
        raise Problem(NEEDS.format(why="this is not Linux, or has no `unshare` command"))
    possible = subprocess.run(["unshare", "-rn", "true"], capture_output=True, text=True)
    if possible.returncode:
        raise Problem(NEEDS.format(why=possible.stderr.strip() or f"status {possible.returncode}"))
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("XDG_") and "proxy" not in name.lower()
    }
    command = ["unshare", "-rn", sys.executable, "-m", "bookkit", "offline", "--inside", str(out)]
    with tempfile.TemporaryDirectory(prefix="book-home-") as home:
        environment["HOME"] = home
        done = subprocess.run([*command, *pages], cwd=book.root, env=environment)
    if done.returncode:
        raise Problem("without a network and without its proofs a chapter fails; see above")


def sample(book: Book, pages: Sequence[str], seconds: float, seed: int) -> list[str]:
    """Chapters in an order of the seed, as long as two at a time should end within these seconds."""
    left, chosen = 2 * seconds, []
    for page in random.Random(seed).sample(list(pages), len(pages)):
        cost = STARTING + sum(seconds_of_cells(book, page).values())
        if cost <= left:
            left -= cost
            chosen.append(page)
    if not chosen:
        raise Problem(f"No chapter runs in {seconds:.0f} seconds: nothing was checked. Give more.")
    return chosen


def unlike_before(book: Book, pages: Sequence[str]) -> Iterator[str]:
    """Cells that show something else without a network, proofs and a reader's calls."""
    first = execute(book, pages)
    with tempfile.TemporaryDirectory(prefix="book-offline-") as folder:
        execute_cut(book, pages, Path(folder))
        for page in pages:
            second = nbformat.read(Path(folder, f"{Path(page).name}.ipynb"), 4)
            for number, line, how in differences(without_proofs(first[page]), second):
                yield f"{page}.md, cell {number}: {line}\n{how}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bookkit offline", description=__doc__.split("\n")[0])
    parser.add_argument(
        "pages", nargs="*", metavar="PAGE", help="such as book/01-mesh; default: all"
    )
    parser.add_argument("--seconds", type=float, help="a sample that should end within this time")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10_000)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    chosen, book = parser.parse_args(arguments), Book()
    if chosen.inside:
        loopback_up()
        prove_cut()
        notebooks = {page: without_proofs(read_as_sphinx(book, page)) for page in chosen.pages}
        write_notebooks(execute_notebooks(book, notebooks, fresh=True), chosen.inside)
        return
    pages = chosen.pages or book.chapters
    if chosen.seconds:
        pages = sample(book, pages, chosen.seconds, chosen.seed)
        print(f"seed {chosen.seed}: {len(pages)} of {len(book.chapters)} chapters", flush=True)
    if found := list(unlike_before(book, pages)):
        said = "\n\n".join(["A second run, without a network, shows something else:", *found])
        raise Problem(
            f"{said}\n\nFix seeds, sort, or print less; cells that time are tagged timing."
        )
    print(f"{len(pages)} chapters: the same outputs without a network and without proofs")
