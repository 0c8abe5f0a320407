"""What the book consists of: its addresses, its languages, its pages. Everything else asks here."""

from __future__ import annotations

import copy
import functools
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml


class Problem(Exception):
    """What a person has to mend: says what is wrong, where, and what to do next."""


def find_root() -> Path:
    """The book's folder: the one that a command was called in, or one above it."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "_config.yml").exists() and (folder / "_toc.yml").exists():
            return folder
    raise Problem(
        f"There is no book in {here} or above it (no _config.yml with a _toc.yml): "
        "call bookkit in the folder of the book"
    )


@dataclass(frozen=True)
class Language:
    code: str  # as Sphinx and gettext spell it: zh_TW
    name: str  # as its readers call it
    path: str  # below the site's address: "zh-TW/"; the source language has ""

    @property
    def web(self) -> str:
        """As HTML and URLs spell it: zh-TW."""
        return self.code.replace("_", "-")


@dataclass(frozen=True)
class Book:
    """The book whose source lies in `root`."""

    root: Path = field(default_factory=find_root)

    @cached_property
    def config(self) -> dict[str, Any]:
        return copy.deepcopy(config_of((self.root / "_config.yml").read_text("utf-8")))

    @cached_property
    def sphinx(self) -> dict[str, Any]:
        return self.config["sphinx"]["config"]

    @property
    def site(self) -> str:
        """Where the site is published, with a slash at the end."""
        return self.config["html"]["baseurl"]

    @property
    def repo(self) -> str:
        """The repository's page, without a slash at the end."""
        return self.config["repository"]["url"]

    @property
    def ref(self) -> str:
        """The branch or tag that Colab opens."""
        return self.sphinx["book_ref"]

    @cached_property
    def languages(self) -> list[Language]:
        """The source language first."""
        return [Language(code, **about) for code, about in self.sphinx["book_languages"].items()]

    def language(self, code: str) -> Language:
        for language in self.languages:
            if code in (language.code, language.web):
                return language
        known = ", ".join(language.code for language in self.languages)
        raise Problem(f"_config.yml knows no language {code!r}: book_languages has {known}")

    @cached_property
    def toc(self) -> Any:
        """_toc.yml as sphinx-external-toc reads it for Sphinx."""
        path = self.root / "_toc.yml"
        return toc_of(path, path.read_text("utf-8"))

    @cached_property
    def pages(self) -> list[str]:
        """Pages (as Sphinx names them: book/01-mesh) in the order of _toc.yml."""
        return [str(page).removesuffix(".md") for page in self.toc]

    @cached_property
    def path(self) -> list[str]:
        """The way that Previous and Next lead: the introduction, and the top level of each part."""
        parts = [part for part in self.toc.root.subtrees if part.caption != "Reference"]
        return [self.pages[0], *(str(page) for part in parts for page in part.files())]

    def sections(self, page: str) -> list[str]:
        """The deeper pages that hang on a chapter."""
        if page not in self.toc or page == self.pages[0]:
            return []
        return [str(one) for part in self.toc[page].subtrees for one in part.files()]

    @cached_property
    def parents(self) -> dict[str, str]:
        """The chapter of each deeper page."""
        return {below: page for page in self.pages for below in self.sections(page)}

    def is_reference(self, page: str) -> bool:
        """Does it stand in the part of _toc.yml that is called Reference?"""
        parts = {file: part.caption for part in self.toc.root.subtrees for file in part.files()}
        return parts.get(self.parents.get(page, page)) == "Reference"

    @staticmethod
    def number(page: str) -> int | None:
        """9 for book/09-fsdp; None for a page without a number, and for the introduction, 00."""
        found = re.match(r"(\d\d)-", page.rsplit("/", 1)[-1])
        return int(found[1]) or None if found else None

    def source(self, page: str) -> Path:
        return self.root / f"{page}.md"

    @cached_property
    def chapters(self) -> list[str]:
        """The pages that are executed: those with a kernel in their front matter."""
        return [page for page in self.pages if is_notebook(self.source(page))]

    def notebook(self, page: str, language: Language | None = None) -> Path:
        """The .ipynb of a chapter; the source language's unless another is given."""
        folder = self.root / "notebooks" / (language.path if language else "")
        return folder / f"{page.removeprefix('book/')}.ipynb"

    def page_url(self, page: str, language: Language | None = None) -> str:
        return f"{self.site}{language.path if language else ''}{page}.html"

    def colab_url(self, page: str, language: Language | None = None) -> str:
        path = self.notebook(page, language).relative_to(self.root).as_posix()
        repo = self.repo.removeprefix("https://github.com/")
        return f"https://colab.research.google.com/github/{repo}/blob/{self.ref}/{path}"

    def kaggle_url(self, page: str, language: Language | None = None) -> str:
        path = self.notebook(page, language).relative_to(self.root).as_posix()
        return f"https://kaggle.com/kernels/welcome?src={self.repo}/blob/{self.ref}/{path}"


# Many ask for the book, each for itself: what its files say is read once.


@functools.cache
def config_of(text: str) -> dict[str, Any]:
    return yaml.safe_load(text)


@functools.cache
def toc_of(path: Path, text: str) -> Any:
    from sphinx_external_toc.parsing import MalformedError, parse_toc_yaml

    try:
        return parse_toc_yaml(path)
    except (MalformedError, yaml.YAMLError) as error:
        raise Problem(f"_toc.yml cannot be read: {error}") from None


def is_notebook(path: Path) -> bool:
    """Does this Markdown file have a kernel, and so cells to execute?"""
    return path.exists() and "\nkernelspec:" in path.read_text("utf-8")[:1000]
