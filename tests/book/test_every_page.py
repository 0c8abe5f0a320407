"""What holds for the code and the links of every page."""

import ast
import re
import textwrap

import jupytext
import pytest

from pages import BOOK, source_of

PAGES = sorted(path.stem for path in BOOK.rglob("*.md"))
# JAX's documentation moved in August 2026: https://docs.jax.dev/en/latest/…
MOVED = {
    "async_dispatch.html": "201/jit.html",
    "gradient-checkpointing.html": "301/remat.html",
    "notebooks/shard_map.html": "201/shard-map.html",
    "transfer_guard.html": "501/transfer-guard.html",
    "persistent_compilation_cache.html": "501/compilation-cache.html",
    "profiling.html": "201/profiling.html",
    "random-numbers.html": "101/random.html",
}


def abstract_meshes(source):
    """The calls of AbstractMesh in some code, each with the number of things that it is told."""
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "AbstractMesh":
            named = [keyword.arg for keyword in node.keywords]
            yield ast.unparse(node), len(node.args) >= 3 or "axis_types" in named


def test_an_abstract_mesh_is_told_its_axis_types():
    """Pages, the companion and programs say the axis types of an AbstractMesh: its default became
    Explicit in JAX 0.11.1."""
    found = []
    for folder in ("companion/many_devices", "examples"):
        for path in sorted((BOOK.parent / folder).rglob("*.py")):
            found += [(path.name, *call) for call in abstract_meshes(path.read_text("utf-8"))]
    for page in PAGES:
        notebook = jupytext.read(source_of(page))
        for cell in notebook.cells if "kernelspec" in notebook.metadata else ():
            if cell.cell_type == "code":
                found += [(page, *call) for call in abstract_meshes(cell.source)]
    assert found and all(told for *_, told in found), [call for call in found if not call[-1]]


@pytest.mark.parametrize("page", PAGES)
def test_no_page_links_to_a_former_address_of_jax_documentation(page):
    """Links to JAX's documentation are to where its pages are now."""
    links = re.findall(r"docs\.jax\.dev/en/latest/([^\s)\"#]+)", source_of(page).read_text())
    assert not set(links) & set(MOVED)
