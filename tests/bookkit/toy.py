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
