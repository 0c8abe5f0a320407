"""Run the examples of every docstring of the installed meshscope: `python doctests.py`.

The standard library alone does it, so that the package can be checked where nothing else is
installed. Eight devices are simulated.
"""

import doctest
import importlib
import os
import pkgutil
import sys


def parts():
    """(name, object) of every module of the package."""
    package = importlib.import_module("meshscope")
    yield package
    for found in pkgutil.iter_modules(package.__path__, "meshscope."):
        yield importlib.import_module(found.name)


def examples():
    """Every docstring with examples, as doctests."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module in parts():
        yield from (test for test in finder.find(module) if test.examples)


def run(test):
    """How many examples of a docstring failed; what was expected and seen is printed."""
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    return runner.run(test, clear_globs=False).failed  # so that it can be run again


if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    found = list(examples())
    failed = [test.name for test in found if run(test)]
    print(f"{len(found)} docstrings with examples, {len(failed)} of them wrong", *failed)
    sys.exit(1 if failed or not found else 0)
