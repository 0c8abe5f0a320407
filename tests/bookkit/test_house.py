"""The house has corridors: what imports what is read from the code, and nothing runs upwards."""
import ast
import collections
import importlib
import subprocess
import sys

import pytest

import bookkit
from bookkit.__main__ import VERBS, main
from toy import ROOT

PACKAGE = ROOT / "bookkit" / "src" / "bookkit"
# From the ground up: a room imports from itself and from what stands before it. Sphinx's extension
# is a wing beside the upper rooms: none of them imports it, and it imports none of them.
FLOORS = ("model", "run", "words", "lint", "site", "stacks", "__main__")
WING = {"sphinx_ext": ("model", "run", "words")}
BY_CONTRACT = {"main", "setup", "logger"}  # what the command, Sphinx and its logging ask of a module
DRAWING = ("<!-- drawn by tests/bookkit/test_house.py -->\n```text\n", "```\n<!-- end of the drawing -->")


def modules():
    """(dotted name below bookkit, syntax tree) of every module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        yield name, ast.parse(path.read_text("utf-8"))


def imported(name, tree):
    """The modules of bookkit that a module imports, anywhere in it; verbs are imported by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name.removeprefix("bookkit.") for one in node.names if one.name.startswith("bookkit."))
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"{name}: import by full name, so that the arrow can be read")
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("bookkit."):
            module = node.module.removeprefix("bookkit").removeprefix(".")
            for one in node.names:  # a module of that room, or a name in that module
                path = PACKAGE.joinpath(*module.split("."), f"{one.name}.py")
                yield f"{module}.{one.name}".strip(".") if path.exists() else module


def arrows(found):
    """(from, to) for each room that imports from another."""
    return {(name.split(".")[0], other.split(".")[0]) for name, tree in found
            for other in imported(name, tree) if name.split(".")[0] != other.split(".")[0]}


def upward(drawn):
    for here, there in sorted(drawn):
        allowed = WING.get(here) or FLOORS[: FLOORS.index(here)]
        if there not in allowed:
            yield (f"bookkit.{here} imports from bookkit.{there}, which stands above it or beside it: "
                   "move what both need down, or pass it in")


def drawing(drawn):
    """Rooms from the top down, each with those that it imports from."""
    lines = [f"{'the command':11} → every verb's module, when it is called"]
    for room in [*reversed(FLOORS[:-1]), *WING]:
        below = [other for other in reversed(FLOORS) if (room, other) in drawn]
        lines.append(f"{room:11} → {', '.join(below) or 'nothing'}")
    return "\n".join(lines) + "\n"


def test_no_room_imports_from_above():
    problems = list(upward(arrows(modules())))
    assert not problems, "\n".join(problems)


def test_an_upward_arrow_is_seen():
    for text in ("from bookkit.site.build import x", "def f():\n    import bookkit.stacks.colab"):
        [problem] = upward(arrows([("words.po", ast.parse(text))]))
        assert "bookkit.words imports from bookkit.s" in problem
    assert list(upward(arrows([("run.execute", ast.parse("from bookkit.sphinx_ext import pages"))])))
    assert not list(upward(arrows([("words.po", ast.parse("from bookkit.model.book import Book"))])))


def in_a_circle(found):
    """Modules that import each other, over however many corners."""
    graph = {name: set(imported(name, tree)) for name, tree in found}

    def reach(start):
        seen, left = set(), [start]
        while left:
            for other in graph.get(left.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    left.append(other)
        return seen
    return sorted(name for name in graph if name in reach(name))


def test_no_modules_import_each_other():
    assert in_a_circle(modules()) == []
    circle = [("a.b", "from bookkit.a.c import x"), ("a.c", "from bookkit.a.b import y"), ("a.d", "from bookkit.a.c import x")]
    assert in_a_circle([(name, ast.parse(text)) for name, text in circle]) == ["a.b", "a.c"]


def public(tree):
    """The names that a module defines for others: functions, classes, constants."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}


def with_two_meanings(found):
    homes = collections.defaultdict(set)
    for name, tree in found:
        for one in public(tree):
            if not one.startswith("_") and one not in BY_CONTRACT:
                homes[one].add(name)
    for one, where in sorted(homes.items()):
        if len(where) > 1:
            yield f"{one} is defined in {' and in '.join(sorted(where))}: import it, or name what each is"


def test_a_public_name_means_one_thing():
    problems = list(with_two_meanings(modules()))
    assert not problems, "\n".join(problems)


def test_a_second_meaning_is_seen():
    texts = {"a": "def place(): pass", "b": "place = 1", "c": "def main(): pass", "d": "def main(): pass",
             "e": "def _own(): pass", "f": "_own = 2"}
    [problem] = with_two_meanings([(name, ast.parse(text)) for name, text in texts.items()])
    assert problem.startswith("place is defined in a and in b")


def test_the_drawing_is_the_codes():
    made = drawing(arrows(modules()))
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    begin, end = DRAWING
    assert f"{begin}{made}{end}" in text, f"ARCHITECTURE.md shows other arrows than the code has:\n{made}"


def test_the_package_says_what_its_rooms_are():
    for room in (*FLOORS[:-1], *WING):
        assert f"\n{room} " in bookkit.__doc__ and importlib.import_module(f"bookkit.{room}").__doc__


# The command.


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_explains_itself(verb, capsys):
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and said.startswith(f"usage: bookkit {verb}") and len(said.splitlines()) > 2
    assert importlib.import_module(f"bookkit.{VERBS[verb][0]}").__doc__


def test_what_a_person_has_to_mend_is_said_without_a_traceback(tmp_path):
    for command in (["-m", "bookkit"], [str(PACKAGE)]):  # installed, and as a folder
        done = subprocess.run([sys.executable, *command, "execute", "--list"], cwd=tmp_path,
                              capture_output=True, text=True)
        assert done.returncode == 1 and done.stderr.startswith("There is no book in") and not done.stdout
        assert len(done.stderr.splitlines()) == 1
    assert main([]) == 2 and main(["no-such-verb"]) == 2 and main(["--help"]) == 0
