"""Packages of bookkit import only from lower layers, and each verb explains itself."""

import ast
import importlib
import subprocess
import sys

import pytest

import bookkit
from bookkit.__main__ import VERBS, main
from toy import ROOT

PACKAGE = ROOT / "bookkit" / "src" / "bookkit"
LAYERS = ("model", "run", "words", "lint", "site", "compilers", "__main__")
SPHINX = ("model", "run", "words")  # what the Sphinx extension may import


def imported():
    """(layer that imports, layer that is imported, the module) for each import within bookkit."""
    for path in sorted(PACKAGE.rglob("*.py")):
        layer = path.relative_to(PACKAGE).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}"]
            else:
                names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name.startswith("bookkit."):
                    yield layer, name.split(".")[1], path


def test_packages_import_only_from_lower_layers():
    for layer, other, path in imported():
        if layer in ("sphinx_ext", *LAYERS):
            lower = SPHINX if layer == "sphinx_ext" else LAYERS[: LAYERS.index(layer)]
            assert other in (layer, *lower), f"{path} imports from bookkit.{other}, a layer above"


def test_the_package_says_what_its_parts_are():
    for part in (*LAYERS[:-1], "sphinx_ext"):
        assert f"\n{part} " in bookkit.__doc__


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_explains_itself(verb, capsys):
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and said.startswith(f"usage: bookkit {verb}")
    assert importlib.import_module(f"bookkit.{VERBS[verb][0]}").__doc__


def test_a_mistake_of_a_person_is_one_sentence(tmp_path):
    for command in (["-m", "bookkit"], [str(PACKAGE)]):  # installed, and as a folder
        command = [sys.executable, *command, "execute", "--list"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 1 and done.stderr.startswith("There is no book in")
        assert not done.stdout and len(done.stderr.splitlines()) == 1
    assert main([]) == 2 and main(["no-such-verb"]) == 2 and main(["--help"]) == 0
