"""The checks import the book's tools from the repository root and each other by name."""
import pathlib
import sys

for folder in (pathlib.Path(__file__).parent, pathlib.Path(__file__).parent.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
