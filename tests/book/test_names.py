"""Names in prose are real: inline code resolves by import, or the page shows it, or it is listed.

A span is accepted when it stands in a code cell or an executed output of its page, when it is a
name that imports on this stack (or a parameter of one, or an attribute of an array, a mesh, …), when
each of its words stands on the page, when the notation page defines it, or when it is a file of the
repository. What is none of these is listed in tests/names.toml, by kind, and checked there as far as
it can be: what is gone must be gone, a flag must be known.
"""
import builtins
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import keyword
import mmap
import pathlib
import re
import tomllib

import pytest

from bookkit.__main__ import VERBS
from bookkit.lint.prose import code_spans
from bookkit.model.chapter import by_name, page_files
from executed import executed, outputs, shown
from rules import BOOK, verify

LIST = BOOK.root / "tests" / "names.toml"
KINDS = ("gone", "flag", "shell", "hlo", "newest-only")
ALIASES = {"jnp": "jax.numpy", "np": "numpy", "nnx": "flax.nnx", "nn": "flax.linen",
           "ms": "meshscope", "P": "jax.P", "ocp": "orbax.checkpoint", "lax": "jax.lax",
           "plt": "matplotlib.pyplot"}
ROOTS = ("jax", "jaxlib", "flax", "optax", "orbax", "numpy", "meshscope", "sklearn", "matplotlib")


@functools.cache
def names():
    return tomllib.loads(LIST.read_text("utf-8")) if LIST.exists() else {}


@functools.cache
def newest():
    """Does this Python have the newest JAX that requirements.txt pins for anyone?"""
    pins = re.findall(r"(?m)^jax==([\d.]+)", (BOOK.root / "requirements.txt").read_text("utf-8"))

    def number(version):
        return [int(part) for part in re.findall(r"\d+", version)]
    return number(importlib.metadata.version("jax")) >= max(map(number, pins))


@functools.cache
def resolve(name):
    """Does this dotted name import, attribute by attribute?"""
    first, *rest = name.split(".")
    parts = ALIASES.get(first, first).split(".") + rest
    if len(parts) == 1 and parts[0] not in ROOTS and (
            hasattr(builtins, parts[0]) or parts[0] in keyword.kwlist):
        return True
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        except Exception:
            return False
        for part in parts[cut:]:
            try:
                found = getattr(found, part)
            except Exception:
                return part in getattr(found, "__annotations__", {}) and part == parts[-1]
        return True
    return False


# Where a name that is written without its module, an attribute or a parameter may come from.
MODULES = ("jax", "jax.sharding", "jax.lax", "jax.numpy", "jax.tree", "jax.experimental.mesh_utils",
           "flax.nnx", "optax", "meshscope", "importlib", "importlib.metadata")
CLASSES = ("jax.Array", "jax.Device", "jax.sharding.NamedSharding", "jax.sharding.Mesh",
           "jax.ShapeDtypeStruct", "jax.stages.Compiled", "jax.stages.Lowered", "flax.nnx.Variable",
           "flax.nnx.Module", "flax.nnx.Optimizer", "meshscope.Collective", "meshscope.Memory")


def bare(name):
    """Does a name without its module import from one of MODULES?"""
    return any(resolve(f"{module}.{name}") for module in MODULES)


def attribute(name):
    return any(resolve(f"{owner}.{name}") for owner in CLASSES)


def parameters(function):
    found = set()
    for one in (function, getattr(function, "__init__", None) if inspect.isclass(function) else None):
        try:
            found |= set(inspect.signature(one).parameters)
        except (TypeError, ValueError):
            pass
    return found


def of_name(name):
    """What a dotted name imports, or None."""
    first, *rest = name.split(".")
    parts = ALIASES.get(first, first).split(".") + rest
    for cut in range(len(parts), 0, -1):
        try:
            return functools.reduce(getattr, parts[cut:], importlib.import_module(".".join(parts[:cut])))
        except (ImportError, AttributeError):
            continue
    return None


@functools.cache
def all_parameters():
    """The parameters of every public function and class of the libraries the book teaches."""
    found = set()
    for module in ("jax", "jax.lax", "jax.sharding", "flax.nnx", "optax", "meshscope"):
        there = importlib.import_module(module)
        for name in dir(there):
            if not name.startswith("_"):
                found |= parameters(getattr(there, name, None))
    return found


def squeezed(text):
    return re.sub(r"\s+", "", text)


def head(span):
    """The dotted name of a span: "jax.make_mesh(…)" and "@nnx.jit" name something to import."""
    found = re.fullmatch(r"@?([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(.*\)|\[.*\])?", span.strip(), re.S)
    return found[1] if found else None


WORD = r"[A-Za-z_]\w*"


def on_page(word, page):
    return bool(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", page))


def known(name, page, given=()):
    """Is a (dotted) name imported, on the page, a parameter given, or an attribute of something?"""
    first, *rest = name.split(".")
    if ALIASES.get(first, first).split(".")[0] in ROOTS:
        return resolve(name)
    if resolve(name) or on_page(name, page) or name in given or bare(name):
        return True
    if not rest:
        return False
    return all(on_page(part, page) or attribute(part) for part in rest)


def accepted(span, page):
    """Is this span real, given all code and output text of its page?"""
    if re.search(rf"(?<![\w.]){re.escape(span)}(?!\w)", page) or \
            re.search(r"\W", span) and squeezed(span) in squeezed(page):
        return True
    given, rest = set(), re.sub(r"[\"'][^\"']*[\"']", "", span)
    if name := head(span):
        if not known(name, page) and name not in all_parameters():
            return False
        given, rest = parameters(of_name(name)), rest.replace(name, "", 1)
    if not re.search(r"[A-Za-z]", span):
        return True  # numbers and signs
    return all(known(token, page, given) or token + "=" in rest and token in all_parameters()
               or re.fullmatch(rf"\W*{token}=\W*", span) and token in all_parameters()
               for token in re.findall(rf"{WORD}(?:\.{WORD})*", rest))


def is_file(span):
    path = span.strip().removeprefix("./")
    return bool(re.fullmatch(r"[\w./-]+", path)) and "/" in path + "/" * ("." in path) and (
        (BOOK.root / path).exists() or pathlib.PurePosixPath(path).parts[:1] == ("_build",))


def is_own_command(span):
    """`make TARGET` of the Makefile, or `python -m bookkit VERB --flag …` with flags that it takes."""
    if found := re.fullmatch(r"make ([\w-]+)", span):
        return found[1] in targets()
    found = re.fullmatch(r"(?:python -m )?bookkit ([\w-]+)((?: [\w.=/-]+)*)", span)
    if not found or found[1] not in VERBS:
        return False
    source = inspect.getsource(importlib.import_module(f"bookkit.{VERBS[found[1]][0]}"))
    return all(f'"{flag}"' in source for flag in re.findall(r"--[\w-]+", found[2]))


def listed(span, table):
    """The kind under which tests/names.toml lists a span, or the name that the span calls."""
    return next((kind for kind in KINDS for text in (span, head(span))
                 if text and text in table.get(kind, {})), None)


def unreal(markdown, page, table, where):
    for span in dict.fromkeys(code_spans(markdown)):
        text = " ".join(span.split())
        if text in defined():
            continue
        if not (listed(text, table) or accepted(text, page) or is_file(text)
                or is_own_command(text)):
            yield (f"{where}: `{text}` neither imports on this stack nor stands in a cell or output "
                   "of the page: correct it, or list it in tests/names.toml")


@functools.cache
def defined():
    """What the notation page defines: the book's own letters, axes and suffixes, not libraries'."""
    path = BOOK.root / "book" / "notation.md"
    spans = code_spans(path.read_text("utf-8")) if path.exists() else ()
    return {" ".join(span.split()) for span in spans
            if not any(ALIASES.get(word, word).split(".")[0] in ROOTS
                       for word in re.findall(rf"{WORD}(?=\.)", span))}


def shown_text(name):
    """Code and outputs of a chapter as one text."""
    chapter = by_name()[name]
    return "\n".join([cell.source for cell in chapter.code]
                     + [shown(output) for _, output in outputs(executed(name))])


@functools.cache
def all_code():
    return "\n".join(cell.source for chapter in by_name().values() for cell in chapter.code)


@pytest.mark.parametrize("path", page_files(), ids=lambda path: path.stem)
def test_spans(path):
    chapter = by_name().get(path.stem)
    if chapter is None:  # a page of text may name what any chapter's code shows
        fenced = "\n".join(re.findall(r"(?ms)^`{3,}.*?^`{3,}\s*$", path.read_text("utf-8")))
        return verify(unreal(path.read_text("utf-8"), all_code() + fenced, names(),
                             f"book/{path.name}"))
    page = shown_text(path.stem)
    return verify(problem for cell in chapter.markdown
                  for problem in unreal(cell.source, page, names(), cell.where))


# The list itself.

def unknown_flag(flag):
    """What is wrong with a flag or environment variable, as far as the installed JAX can tell."""
    name = re.sub(r"^(?:[A-Z_]+=)?[\"']?-*", "", flag).split("=")[0].split(" ")[0]
    if re.fullmatch(r"jax_\w+|JAX_\w+", name):
        import jax
        known = hasattr(jax.config, name.lower())
        return None if known or name in ("JAX_PLATFORM_NAME",) else f"{name} is no option of jax.config"
    if name.startswith("xla_") and not name.startswith("xla_tpu"):
        folder = pathlib.Path(importlib.util.find_spec("jaxlib").origin).parent
        for library in sorted(folder.rglob("*.so"), key=lambda path: -path.stat().st_size):
            with library.open("rb") as file:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    if data.find(name.encode()) >= 0:
                        return None
        return f"the installed XLA does not know {name}"
    return None


def targets():
    path = BOOK.root / "Makefile"
    found = re.findall(r"(?m)^([\w -]+):(?!=)", path.read_text("utf-8")) if path.exists() else []
    return {name for line in found for name in line.split()}


def wrong_entries(table, on_newest, make_targets):
    """Entries of tests/names.toml that are not what their kind says."""
    for kind in table:
        if kind not in KINDS:
            yield f"tests/names.toml: [{kind}] is no kind; there are {', '.join(KINDS)}"
    for kind in KINDS:
        for name, why in table.get(kind, {}).items():
            where = f"tests/names.toml, [{kind}] \"{name}\""
            if not isinstance(why, str) or not why.strip():
                yield f"{where}: say why, or where it is from"
            if kind in ("gone", "newest-only") and "." not in name:
                yield f"{where}: write the whole dotted name, so that it can be looked up"
            elif kind == "gone" and on_newest and resolve(name):
                yield f"{where}: it imports on the newest stack, so it is not gone"
            elif kind == "newest-only" and on_newest and not resolve(name):
                yield f"{where}: it does not import on the newest stack"
            elif kind == "flag" and (problem := unknown_flag(name)):
                yield f"{where}: {problem}"
            elif kind == "shell" and (found := re.match(r"make ([\w-]+)", name)) \
                    and found[1] not in make_targets:
                yield f"{where}: the Makefile has no target {found[1]}"


def test_the_list():
    verify(wrong_entries(names(), newest(), targets()))


def unused(table, spans):
    heads = spans | {head(span) for span in spans}
    for kind in KINDS:
        for name in table.get(kind, {}):
            if name not in heads:
                yield f"tests/names.toml, [{kind}] \"{name}\": no page says it; delete the entry"


def test_nothing_listed_in_vain():
    spans = {" ".join(span.split()) for path in page_files()
             for span in code_spans(path.read_text("utf-8"))}
    verify(unused(names(), spans))
