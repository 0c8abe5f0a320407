"""The book's Sphinx extension.

execution   chapters are executed once, normalised and cached; failing cells name themselves
markdown    GitHub alerts become admonitions, the badge line of notebooks is left out
own_urls    links and images by published URL become checked internal ones
search      the sections that the search page searches
api_links   names of JAX, Flax, Optax and Orbax lead to their documentation
translation addresses per language, comments, drawings, and what translated builds lose
reference   meshscope's docstrings become a page
folds       answers and asides; folded cells are called by their titles
entries     sections of reference pages have short anchors
mathml      formulas are MathML, without a script
figures     drawings are inlined; figures and tables are numbered and have anchors
pages       notebooks to download, files that no page loads
frame       what templates are told: languages, Previous and Next, descriptions; 404.html
"""

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config

from bookkit.sphinx_ext import (
    api_links,
    entries,
    execution,
    figures,
    folds,
    frame,
    markdown,
    markdown_twins,
    mathml,
    own_urls,
    pages,
    reference,
    search,
    translation,
)

TEMPLATES = Path(__file__).with_name("templates")


def add_templates(app: Sphinx, config: Config) -> None:
    config.templates_path.append(str(TEMPLATES))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("config-inited", add_templates)
    app.add_config_value("book_ref", "main", "html", str)
    app.add_config_value("book_languages", {}, "html", dict)
    parts = (
        execution,
        own_urls,
        markdown,
        pages,
        frame,
        reference,
        search,
        api_links,
        translation,
        markdown_twins,
    )
    for part in (*parts, folds, entries, figures, mathml):
        part.setup(app)
    return {
        "version": "1",
        "env_version": 3,
        "parallel_read_safe": True,
        "parallel_write_safe": True,
    }
