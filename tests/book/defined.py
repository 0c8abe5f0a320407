"""What a program in examples/ defines, and what a page shows of it."""

import ast
import importlib.util

from pages import cells_of


def definitions(source):
    """Functions, classes and plain variables, as syntax trees."""
    named = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            named[node.name] = ast.dump(node)
        elif isinstance(node, ast.Assign):
            named[ast.unparse(node.targets[0])] = ast.dump(node)
    return named


def functions(source):
    """Functions alone, as syntax trees."""
    named = definitions(source)
    return {name: tree for name, tree in named.items() if tree.startswith("FunctionDef(")}


def shown(name, defined=definitions):
    """What the cells of a page define in view."""
    found = {}
    for cell in cells_of(name):
        found |= defined(cell.source) if cell.in_view else {}
    return found


def program_at(path):
    """The module of a file, imported now under its own name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program
