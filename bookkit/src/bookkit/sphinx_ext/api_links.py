"""Names of JAX, Flax, Optax and Orbax in the text lead to their documentation.

`nnx.Linear` in code font becomes a link where a section first says it; headings, code cells and what
is a link already stay. Intersphinx finds the address in site/inventories, so no build needs a network,
and a name that the documentation lacks stays as it is.
"""

import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.ext.intersphinx import resolve_reference_any_inventory
from sphinx.transforms.post_transforms import SphinxPostTransform

NAME = re.compile(r"((jax|jnp|nnx|flax|optax|ocp|orbax)(?:\.\w+)+)(?:\(.*\))?")
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


def section_of(node: nodes.Node) -> nodes.Node | None:
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
            if link := self.link(name[1], code):
                seen.add((name[1], id(section)))
                code.replace_self(link)

    def link(self, written: str, code: nodes.literal) -> nodes.reference | None:
        for target in candidates(written):
            about = {"refdomain": "py", "reftype": "obj", "reftarget": target}
            xref = addnodes.pending_xref("", code.deepcopy(), refdoc=self.env.docname, **about)
            found = resolve_reference_any_inventory(self.env, False, xref, code.deepcopy())
            if found is not None:
                found["classes"] = ["api"]
                return found
        return None


def setup(app: Sphinx) -> None:
    app.add_post_transform(ApiLinks)
