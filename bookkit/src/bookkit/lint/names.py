"""Names in prose are real: inline code resolves by import, or the page shows it, or it is listed.

A span is accepted when it stands in a code cell or an executed output of its page, when it is a
name that imports on this stack (or a parameter of one, or an attribute of an array, a mesh, …), when
each of its words stands on the page, when the notation page defines it, when an entry quotes it as a
message, or when it is a file of the repository. What is none of these is listed in tests/names.toml,
by kind, and checked there as far as it can be: what is gone must be gone, a flag must be known.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import keyword
import mmap
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from bookkit.lint.outputs import outputs, text_of_output
from bookkit.lint.prose import code_spans
from bookkit.lint.rules import CHAPTER, PAGE, REFERENCE, WHOLE, Page, Said, SaidOfBook, rule
from bookkit.model.book import Book
from bookkit.model.chapter import by_name, page_files
from bookkit.model.entries import quoted
from bookkit.model.verbs import VERBS

NAME_KINDS = ("gone", "flag", "shell", "hlo", "newest-only", "torch", "quoted")
ALIASES = {
    "jnp": "jax.numpy",
    "np": "numpy",
    "nnx": "flax.nnx",
    "nn": "flax.linen",
    "ms": "meshscope",
    "P": "jax.P",
    "ocp": "orbax.checkpoint",
    "lax": "jax.lax",
    "plt": "matplotlib.pyplot",
}
ROOTS = "jax jaxlib flax optax orbax numpy meshscope sklearn matplotlib".split()
# Where a name that is written without its module, an attribute or a parameter may come from.
MODULES = (
    "jax jax.sharding jax.lax jax.numpy jax.tree jax.experimental.layout jax.experimental.mesh_utils "
    "flax.nnx optax meshscope "
    "importlib importlib.metadata"
).split()
CLASSES = (
    "jax.Array jax.Device jax.sharding.NamedSharding jax.sharding.Mesh jax.ShapeDtypeStruct "
    "jax.stages.Compiled jax.stages.Lowered flax.nnx.Variable flax.nnx.Module flax.nnx.Optimizer "
    "flax.nnx.State flax.nnx.Rngs "
    "meshscope.Collective meshscope.Memory"
).split()
TAUGHT = ("jax", "jax.lax", "jax.sharding", "flax.nnx", "optax", "meshscope")
WORD = r"[A-Za-z_]\w*"


# What imports here.


@functools.cache
def imported(name: str) -> tuple[bool, Any]:
    """Does this dotted name import, attribute by attribute; and what it is, if it can be had."""
    first, *rest = name.split(".")
    parts = ALIASES.get(first, first).split(".") + rest
    if len(parts) == 1 and parts[0] not in ROOTS:
        if hasattr(builtins, name) or name in keyword.kwlist:
            return True, getattr(builtins, name, None)
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        except Exception:
            return False, None
        for part in parts[cut:]:
            try:
                found = getattr(found, part)
            except Exception:
                annotated = part in getattr(found, "__annotations__", {}) and part == parts[-1]
                return annotated, None
        return True, found
    return False, None


def resolves(name: str) -> bool:
    return imported(name)[0]


def parameters(function: Any) -> set[str]:
    found: set[str] = set()
    for one in (function, function.__init__) if inspect.isclass(function) else (function,):
        try:
            found |= set(inspect.signature(one).parameters)
        except (TypeError, ValueError):
            pass
    return found


@functools.cache
def all_parameters() -> set[str]:
    """The parameters of every public function and class of the libraries the book teaches."""
    found = set()
    for module in map(importlib.import_module, TAUGHT):
        for name in dir(module):
            if not name.startswith("_"):
                found |= parameters(getattr(module, name, None))
    return found


@functools.cache
def on_newest_stack(root: Path) -> bool:
    """Does this Python have the newest JAX that requirements.txt pins for anyone?"""
    pins = re.findall(r"(?m)^jax==([\d.]+)", (root / "requirements.txt").read_text("utf-8"))

    def number(version: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", version)]

    return number(importlib.metadata.version("jax")) >= max(map(number, pins))


# Is a span real?


def head(span: str) -> str | None:
    """The dotted name of a span: "jax.make_mesh(…)" and "@nnx.jit" name something to import."""
    call = rf"@?({WORD}(?:\.{WORD})*)(?:\(.*\)|\[.*\])?"
    found = re.fullmatch(call, span.strip(), re.S)
    return found[1] if found else None


def on_page(word: str, page: str) -> bool:
    return bool(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", page))


def known(name: str, page: str, given: set[str]) -> bool:
    """Is a (dotted) name imported, on the page, a parameter given, or an attribute of something?"""
    first, *rest = name.split(".")
    if ALIASES.get(first, first).split(".")[0] in ROOTS:
        return resolves(name)
    if resolves(name) or on_page(name, page) or name in given:
        return True
    if any(resolves(f"{module}.{name}") for module in MODULES):
        return True
    return bool(rest) and all(
        on_page(part, page) or any(resolves(f"{owner}.{part}") for owner in CLASSES)
        for part in rest
    )


def accepted(span: str, page: str) -> bool:
    """Is this span real, given all code and output text of its page?"""
    if re.search(rf"(?<![\w.]){re.escape(span)}(?!\w)", page):
        return True
    if re.search(r"\W", span) and re.sub(r"\s+", "", span) in re.sub(r"\s+", "", page):
        return True
    given: set[str] = set()
    rest = re.sub(r"[\"'][^\"']*[\"']", "", span)
    if name := head(span):
        if not known(name, page, set()) and name not in all_parameters():
            return False
        given, rest = parameters(imported(name)[1]), rest.replace(name, "", 1)
    return all(  # numbers and signs have no names
        known(token, page, given)
        or (token in all_parameters() and (f"{token}=" in rest or span.strip() == f"{token}="))
        for token in re.findall(rf"{WORD}(?:\.{WORD})*", rest)
    )


def is_file(span: str, root: Path) -> bool:
    path = span.strip().removeprefix("./")
    if PurePosixPath(path).parts[:1] == ("_build",):
        return True  # made when it is asked for
    looks_so = re.fullmatch(r"[\w./-]+", path) and re.search(r"[/.]", path)
    return bool(looks_so) and (root / path).exists()


def is_own_command(span: str, root: Path) -> bool:
    """`make TARGET` of the Makefile, or `bookkit VERB --flag …` with flags that it takes."""
    if found := re.fullmatch(r"make ([\w-]+)", span):
        return found[1] in make_targets(root)
    found = re.fullmatch(r"(?:python -m )?bookkit ([\w-]+)((?: [\w.=/-]+)*)", span)
    if not found or found[1] not in VERBS:
        return False
    source = inspect.getsource(importlib.import_module(f"bookkit.{VERBS[found[1]][0]}"))
    return all(f'"{flag}"' in source for flag in re.findall(r"--[\w-]+", found[2]))


def make_targets(root: Path) -> set[str]:
    path = root / "Makefile"
    found = re.findall(r"(?m)^([\w -]+):(?!=)", path.read_text("utf-8")) if path.exists() else []
    return {name for line in found for name in line.split()}


Table = dict[str, dict[str, str]]


@functools.cache
def listed_names(root: Path) -> Table:
    return tomllib.loads((root / "tests" / "names.toml").read_text("utf-8"))


@functools.cache
def notation(root: Path) -> set[str]:
    """What the notation page defines: the book's own letters, axes and suffixes, not libraries'."""
    path = root / "book" / "notation.md"
    return {
        span
        for span in spans_of(path.read_text("utf-8") if path.exists() else "")
        if not any(
            ALIASES.get(word, word).split(".")[0] in ROOTS
            for word in re.findall(rf"{WORD}(?=\.)", span)
        )
    }


def spans_of(markdown: str) -> set[str]:
    return {" ".join(span.split()) for span in code_spans(markdown)}


@functools.cache
def code_of_all(root: Path) -> str:
    return "\n".join(cell.source for chapter in by_name(root).values() for cell in chapter.code)


def shown_on(page: Page) -> str:
    """Code and outputs of a page as one text; a page without code may name that of any."""
    if page.chapter.code:
        texts = [cell.source for cell in page.chapter.code]
        return "\n".join([*texts, *(text_of_output(output) for _, output in outputs(page))])
    source = "\n".join(cell.source for cell in page.chapter.cells)
    fenced = re.findall(r"(?ms)^`{3,}.*?^`{3,}\s*$", source)
    return "\n".join([code_of_all(page.book.root), *fenced])


@rule(CHAPTER, PAGE, REFERENCE)
def real_names(page: Page) -> Said:
    """Inline code names what imports here, what the page shows, or what tests/names.toml lists."""
    root = page.book.root
    if page.chapter.code and page.executed is None:
        return  # the rule `executed` says so
    shown, table, messages = shown_on(page), listed_names(root), quoted(page.book)
    for cell in page.chapter.markdown:
        for span in sorted(spans_of(cell.source)):
            listed = any(
                one in table.get(kind, ()) for kind in NAME_KINDS for one in (span, head(span))
            )
            if not (
                listed
                or span in notation(root)
                or span in messages
                or accepted(span, shown)
                or is_file(span, root)
                or is_own_command(span, root)
            ):
                at = cell.source.find(f"`{span}`")
                line = cell.line + cell.source.count("\n", 0, max(at, 0))
                what = "neither imports on this stack nor stands in a cell or output of the page"
                yield line, f"`{span}` {what}: correct it, or list it in tests/names.toml"


# The list itself.


def unknown_flag(flag: str) -> str | None:
    """What is wrong with a flag or environment variable, as far as the installed JAX can tell."""
    name = re.sub(r"^(?:[A-Z_]+=)?[\"']?-*", "", flag).split("=")[0].split(" ")[0]
    if re.fullmatch(r"jax_\w+|JAX_\w+", name):
        import jax

        known_here = hasattr(jax.config, name.lower()) or name == "JAX_PLATFORM_NAME"
        return None if known_here else f"{name} is no option of jax.config"
    if name.startswith("xla_") and not name.startswith("xla_tpu"):
        spec = importlib.util.find_spec("jaxlib")
        folder = Path(spec.origin).parent if spec and spec.origin else Path()
        for library in sorted(folder.rglob("*.so"), key=lambda path: -path.stat().st_size):
            with library.open("rb") as file:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    if data.find(name.encode()) >= 0:
                        return None
        return f"the installed XLA does not know {name}"
    return None


def wrong_entries(table: Table, on_newest: bool, targets: set[str]) -> Iterator[str]:
    """Entries of tests/names.toml that are not what their kind says."""
    for kind in table:
        if kind not in NAME_KINDS:
            yield f"[{kind}] is no kind; there are {', '.join(NAME_KINDS)}"
    for kind in NAME_KINDS:
        for name, why in table.get(kind, {}).items():
            where = f'[{kind}] "{name}"'
            if not isinstance(why, str) or not why.strip():
                yield f"{where}: say why, or where it is from"
            if kind in ("gone", "newest-only") and "." not in name:
                yield f"{where}: write the whole dotted name, so that it can be looked up"
            elif kind == "gone" and on_newest and resolves(name):
                yield f"{where}: it imports on the newest stack, so it is not gone"
            elif kind == "newest-only" and on_newest and not resolves(name):
                yield f"{where}: it does not import on the newest stack"
            elif kind == "flag" and (problem := unknown_flag(name)):
                yield f"{where}: {problem}"
            elif kind == "quoted" and not re.search(r"[\w.-]+/[\w.-]+#\d+", why):
                yield f"{where}: name the public thread that shows it, as owner/repository#1"
            elif kind == "shell" and (found := re.match(r"make ([\w-]+)", name)):
                if found[1] not in targets:
                    yield f"{where}: the Makefile has no target {found[1]}"


def names_in_vain(table: Table, spans: set[str]) -> Iterator[str]:
    heads = spans | {head(span) for span in spans}
    for kind in NAME_KINDS:
        for name in table.get(kind, {}):
            if name not in heads:
                yield f'[{kind}] "{name}": no page says it; delete the entry'


@rule(WHOLE)
def names_listed(book: Book) -> SaidOfBook:
    """tests/names.toml lists what pages say, each name under the kind that it is."""
    table = listed_names(book.root)
    spans = {span for path in page_files(book.root) for span in spans_of(path.read_text("utf-8"))}
    said = [*wrong_entries(table, on_newest_stack(book.root), make_targets(book.root))]
    for what in [*said, *names_in_vain(table, spans)]:
        yield "tests/names.toml", 1, what
