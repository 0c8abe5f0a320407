"""What the made-up chapters and books of the checks have in common."""

from bookkit.model.book import Book

ROOT = Book().root
FRONT = """---
jupytext:
  text_representation:
    extension: .md
    format_name: myst
kernelspec:
  display_name: Python 3
  language: python
  name: python3
---
"""


def code(source, *tags, **options):
    """A code cell as a chapter has it: code("x = 1", "mesh", cellView="form")."""
    known = {**({"tags": f"[{', '.join(tags)}]"} if tags else {}), **options}
    head = "".join(f":{name}: {value}\n" for name, value in known.items())
    return f"```{{code-cell}} ipython3\n{head}{chr(10) * bool(head)}{source}\n```"


def link_site(root):
    """Give a made-up book the real frame of pages."""
    (root / "site").symlink_to(ROOT / "site")
