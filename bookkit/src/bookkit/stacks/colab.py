"""Run every notebook as Colab would, in both languages.

    bookkit colab                         all, in the stand-in
    bookkit colab notebooks/01-mesh.ipynb notebooks/zh-TW/01-mesh.ipynb
    bookkit colab --list cpu-2026-09      with another of Colab's package lists
    bookkit colab --image us-docker.pkg.dev/colab-images/public/runtime

The stand-in is a Python 3.13 with the packages of colab_lists/LIST.txt and a `google.colab`. What
runs is a clone of the commit that is checked out. One line of a notebook is changed: the address that
the setup cell installs meshscope from leads to a folder with the wheel of that commit, which has to
have the hash that the cell names. Each notebook runs alone, in an empty folder, with an empty home
and a fresh copy of the environment, so the setup cell finds the old JAX each time. With --image, each
runs in a fresh container of Colab's own runtime instead; the clone is mounted read-only.

Before all others, one notebook meets a wheel that somebody changed: its setup cell has to refuse it
with a sentence, and to leave everything as it was.

After each: numpy is as it was, JAX is the setup cell's, the CUDA plugin is gone, and nothing was
written in the clone. The report names the first cell that fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bookkit.model.book import Book, Problem
from bookkit.model.package import FILE
from bookkit.stacks.attempt import (
    Checkout,
    Outcome,
    announce,
    checkout,
    clean_environment,
    notebook_command,
    run_notebook,
)
from bookkit.stacks.environments import find_python, make_environment

LISTS = Path(__file__).with_name("colab_lists")
NEWEST_GPU_LIST = "gpu-2026-08"
MINUTES_IN_COLAB = 40  # for one notebook, installation included
STAND_IN = {  # what the notebooks, JAX and Treescope look for in Colab's own package
    "google/colab/__init__.py": '''
        """A stand-in for Colab's package: it can be imported, and loaded as Colab's kernel does."""
        from google.colab import output


        def load_ipython_extension(shell):
            pass
        ''',
    "google/colab/output.py": '''
        """A stand-in: there is no browser to talk to."""


        def eval_js(script, ignore_result=False, timeout_sec=None):
            return None
        ''',
    "colab_kernel_launcher.py": '''
        """A stand-in for the module that starts Colab's kernels."""
        from ipykernel import kernelapp

        if __name__ == "__main__":
            kernelapp.launch_new_instance()
        ''',
}


def list_path(book: Book, name: str) -> Path:
    path = LISTS / f"{name}.txt"
    if not path.exists():
        known = ", ".join(sorted(path.stem for path in path.parent.glob("*.txt")))
        raise Problem(f"There is no list {name}: colab_lists has {known}")
    return path


def python_of(path: Path) -> str:
    """The version of Python that a list's first line names."""
    found = re.search(r"Python (\d+\.\d+)", path.read_text("utf-8").split("\n")[0])
    if not found:
        raise Problem(f"{path}: its first line has to name a Python, such as “Python 3.13”")
    return found[1]


def colab_environment(book: Book, name: str) -> Path:
    """The environment before any notebook has run, installed once and never run in."""
    path = list_path(book, name)

    def install(python: Path) -> None:
        pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--no-deps"]
        try_it: list[str | Path] = [
            python,
            "-c",
            "import jax, flax, sklearn, IPython, nbclient, yaml",
        ]
        for command in ([*pip, "-r", path], try_it):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise Problem(f"Colab's packages, {path.name}, cannot be installed:\n{done.stderr}")
        packages = next(python.parent.parent.glob("lib/python*/site-packages"))
        for file, text in STAND_IN.items():
            (packages / file).parent.mkdir(parents=True, exist_ok=True)
            (packages / file).write_text(textwrap.dedent(text).lstrip(), "utf-8")

    folder = book.root / "_build" / "colab" / name
    key = path.read_text("utf-8") + repr(STAND_IN)
    return make_environment(folder, lambda: find_python(python_of(path)), key, install)


@contextmanager
def fresh_copy(environment: Path) -> Iterator[Path]:
    """A copy made of hard links, which takes seconds: pip replaces files and never changes them."""
    with tempfile.TemporaryDirectory(prefix="run-", dir=environment.parent) as folder:
        copy = Path(folder, "colab")
        shutil.copytree(environment, copy, symlinks=True, copy_function=os.link)
        yield copy / "bin" / "python"


def in_stand_in(
    book: Book,
    copy: Checkout,
    name: str,
    environment: Path,
    out: Path,
    site: Path | None = None,
) -> Outcome:
    with (
        fresh_copy(environment) as python,
        tempfile.TemporaryDirectory(prefix="book-home-") as home,
    ):
        variables = clean_environment(Path(home), python.parent)
        variables["PIP_CACHE_DIR"] = str(book.root / "_build" / "colab" / "pip-cache")
        options = ("--colab", "--site", f"{(site or copy.site).as_uri()}/")
        command = [str(python), *notebook_command(book, copy.path / name, out, *options)]
        return run_notebook(
            command, name, out / "result.json", variables, copy.path, MINUTES_IN_COLAB * 60
        )


def in_container(
    book: Book, copy: Checkout, name: str, image: str, out: Path, site: Path | None = None
) -> Outcome:
    """A container is fresh, and so are its environment and its home; the image's settings stay."""
    folders = {f"{copy.path}": "/book:ro", f"{site or copy.site}": "/site:ro", f"{out}": "/out"}
    mounts = [piece for item in folders.items() for piece in ("--volume", ":".join(item))]
    settings = ["--env", "PYTHONDONTWRITEBYTECODE=1"]
    start = ["docker", "run", "--rm", "--workdir", "/book", *mounts, *settings]
    command = [*start, "--entrypoint", "python3", image]
    options = ("--colab", "--site", "file:///site/")
    command += notebook_command(book, Path("/book", name), Path("/out"), *options)
    return run_notebook(
        command, name, out / "result.json", os.environ, copy.path, MINUTES_IN_COLAB * 60
    )


def notebooks_named(book: Book, named: Sequence[str] = ()) -> list[str]:
    """Paths of notebooks below the root: all in all languages, or those named."""
    known = [
        book.notebook(page, language).relative_to(book.root).as_posix()
        for language in book.languages
        for page in book.chapters
    ]
    if unknown := [name for name in named if name not in known]:
        raise Problem(
            f"No notebook of this book: {', '.join(unknown)}. There are {', '.join(known)}"
        )
    return [name for name in known if name in named or not named]


def not_refused(outcome: Outcome) -> str:
    """What is wrong with how a notebook met a changed wheel; empty if it refused it as it should."""
    if outcome.passed:
        return "installed a wheel that somebody had changed"
    if not re.search(rf"AssertionError: .*{FILE.pattern} is not the wheel that", outcome.error):
        said = f"{outcome.error}\n{outcome.trace}".strip()
        return f"met a changed wheel, and failed without saying so: {said[-2000:]}"
    if outcome.before != outcome.versions:
        return (
            f"refused a changed wheel after installing: {outcome.before}, then {outcome.versions}"
        )
    return ""


def attempts(
    book: Book, names: Sequence[str], colab_list: str = NEWEST_GPU_LIST, image: str = ""
) -> Iterator[tuple[Outcome, Path]]:
    """Each notebook's outcome, with the folder of what it executed until the next is asked for."""
    environment = Path() if image else colab_environment(book, colab_list)

    def attempt(name: str, out: Path, site: Path) -> Outcome:
        out.chmod(0o777)  # a container may run as somebody else
        if image:
            return in_container(book, copy, name, image, out, site)
        return in_stand_in(book, copy, name, environment, out, site)

    with checkout(book) as copy:
        announce(copy)
        for name in names[:1]:
            with tempfile.TemporaryDirectory(prefix="book-out-") as out:
                outcome = attempt(name, Path(out), copy.other_site)
            if wrong := not_refused(outcome):
                raise Problem(f"{name} {wrong}")
            print(f"{name} refused a changed wheel:\n    {outcome.error.strip()}", flush=True)
        for name in names:
            with tempfile.TemporaryDirectory(prefix="book-out-") as out:
                outcome = attempt(name, Path(out), copy.site)
                if outcome.passed and (written := copy.written()):
                    outcome.status = "failed"
                    outcome.error = f"it wrote in the checkout: {written}"
                yield outcome, Path(out)


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(prog="bookkit colab", description=__doc__.split("\n")[0])
    options.add_argument("notebooks", nargs="*", metavar="NOTEBOOK", help="default: all")
    options.add_argument(
        "--list", default=NEWEST_GPU_LIST, help=f"of colab_lists ({NEWEST_GPU_LIST})"
    )
    options.add_argument(
        "--image", default="", help="run in fresh containers of this image instead"
    )
    chosen, book = options.parse_args(arguments), Book()
    if chosen.image and not shutil.which("docker"):
        raise Problem(
            "--image needs docker, which is not in PATH: install it, or leave --image out"
        )
    where = chosen.image or f"Colab's {chosen.list}"
    failed, count, shown = [], 0, {}
    for outcome, _ in attempts(
        book, notebooks_named(book, chosen.notebooks), chosen.list, chosen.image
    ):
        print(outcome.says(where), flush=True)
        count += 1
        failed += [] if outcome.passed else [outcome.name]
        shown = {"before": outcome.before, "after": outcome.versions}
    for when, found in shown.items():
        print(f"{when}: " + ", ".join(f"{name} {version}" for name, version in found.items()))
    if failed:
        raise Problem(f"{len(failed)} of {count} notebooks failed: {', '.join(failed)}")
    print(f"{count} notebooks passed, each alone, with {where}")
