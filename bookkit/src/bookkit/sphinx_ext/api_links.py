"""Names of JAX, Flax, Optax and Orbax lead to their documentation.

In the text, `nnx.Linear` in code font becomes a link where a section first says it; in cells, where the
page first uses it. Headings, and what is a link already, stay. Intersphinx finds the address in
site/inventories, so no build needs a network, and a name that the documentation lacks stays as it is.
"""

import html
import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.intersphinx import resolve_reference_any_inventory
from sphinx.transforms.post_transforms import SphinxPostTransform

PACKAGES = "jax|jnp|nnx|flax|optax|ocp|orbax"
NAME = re.compile(rf"((?:{PACKAGES})(?:\.\w+)+)(?:\(.*\))?")
IN_CELLS = re.compile(  # as Pygments writes it
    rf'<span class="n">(?:{PACKAGES})</span>(?:<span class="o">\.</span><span class="n">\w+</span>)+'
)
# What pages write, and where the documentation may have it.
WRITTEN = {
    "jax": ["jax", "jax.sharding"],
    "jnp": ["jax.numpy"],
    "nnx": ["flax.nnx", "flax.nnx.optimizer", "flax.nnx.spmd"],
    "ocp": ["orbax.checkpoint.experimental.v1"],
    "optax": ["optax", "optax.losses"],
}
OTHER_NAMES = {"jax.P": "jax.sharding.PartitionSpec"}
LEFT_ALONE = (nodes.reference, nodes.title, addnodes.desc_signature, nodes.literal_block)


def candidates(written: str) -> Iterator[str]:
    package, _, rest = written.partition(".")
    if written in OTHER_NAMES:
        yield OTHER_NAMES[written]
    for prefix in WRITTEN.get(package, [package]):
        yield f"{prefix}.{rest}"


def address_of(env: BuildEnvironment, page: str, written: str) -> str | None:
    for target in candidates(written):
        about = {"refdomain": "py", "reftype": "obj", "reftarget": target, "refdoc": page}
        xref = addnodes.pending_xref("", **about)
        found = resolve_reference_any_inventory(env, False, xref, nodes.literal())
        if found is not None:
            return str(found["refuri"])
    return None


def section_of(node: nodes.Node) -> nodes.Node | None:
    """The section in which a name may become a link."""
    while node is not None and not isinstance(node, nodes.section):
        if isinstance(node, LEFT_ALONE):
            return None
        node = node.parent
    return node


class ApiLinks(SphinxPostTransform):
    default_priority = 20

    def run(self, **_: Any) -> None:
        seen = set()
        for code in list(self.document.findall(nodes.literal)):
            name, section = NAME.fullmatch(code.astext()), section_of(code)
            if not name or section is None or (name[1], id(section)) in seen:
                continue
            if address := address_of(self.env, self.env.docname, name[1]):
                seen.add((name[1], id(section)))
                text = code.deepcopy()
                link = nodes.reference(
                    "", "", text, refuri=address, internal=False, classes=["api"]
                )
                code.replace_self(link)


def link_cells(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    seen = set()

    def linked(found: re.Match[str]) -> str:
        written = re.sub("<[^>]+>", "", found[0])
        address = None if written in seen else address_of(app.env, pagename, written)
        seen.add(written)
        return (
            f'<a class="api" href="{html.escape(address)}">{found[0]}</a>' if address else found[0]
        )

    if pagename in app.env.found_docs:
        context["body"] = IN_CELLS.sub(linked, context["body"])


def setup(app: Sphinx) -> None:
    app.add_post_transform(ApiLinks)
    app.connect("html-page-context", link_cells)
