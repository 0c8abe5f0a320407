"""How the book is executed, checked, translated, built and tried; `bookkit` lists its commands.

model        what the book consists of: pages, chapters, cells, languages
run          cells are executed, and executions compared
words        what is read: catalogues, translations, notebooks
lint         the rules of pages; planted faults, and what proves a row of the coverage table
site         pages in every language put together, published, looked at
stacks       the same on other Pythons, other releases, in Colab
sphinx_ext   what Sphinx is taught about this book

Each room imports from itself and from rooms above it in this list; sphinx_ext stands above words.
"""
