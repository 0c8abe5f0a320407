"""How the book is executed, checked, translated, built and tried; `bookkit` lists its commands.

model        what the book consists of: pages, chapters, cells, languages
run          cells are executed
words        what is read: catalogues, translations, notebooks
lint         the rules of pages, and of the tables beside them
site         pages in every language put together, published, looked at
compilers    programs of the book, compiled for TPU and GPU too
sphinx_ext   what Sphinx is taught about this book

Each package imports only from itself and from packages above it in this list; sphinx_ext is above words.
"""
