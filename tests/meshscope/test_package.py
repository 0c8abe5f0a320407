"""meshscope as a package: what it exports, documents and imports."""

import ast
import importlib.metadata
import inspect
import os
import pathlib
import pickle
import re
import subprocess
import sys
import tomllib

import doctests
import jax
import pytest

import meshscope as ms

SOURCE = pathlib.Path(ms.__file__).parent
EXAMPLES = list(doctests.examples())


def public():
    """(name, object) of everything that a user may name, methods and properties too."""
    for name in ms.__all__:
        found = getattr(ms, name)
        if not callable(found):
            continue
        yield name, found
        for member, inside in vars(found).items() if inspect.isclass(found) else ():
            if not member.startswith("_") and (callable(inside) or isinstance(inside, property)):
                yield f"{name}.{member}", inside


@pytest.mark.parametrize("name", [name for name, _ in public()])
def test_every_public_docstring_has_an_example(name):
    found = dict(public())[name]
    assert found.__doc__ and ">>> " in found.__doc__
    documented = [test for test in EXAMPLES if test.name.endswith(f".{name}")]
    assert len(documented) == 1, "and it is among those that are run"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda test: test.name)
def test_an_example_gives_what_it_says(example):
    assert doctests.run(example) == 0


def test_examples_can_fail():
    """A wrong expectation is noticed, in the script as in the test."""
    wrong = doctests.doctest.DocTestParser().get_doctest(">>> 1\n2\n", {}, "wrong", "wrong", 0)
    assert doctests.run(wrong) == 1


def test_every_docstring_says_what_its_parameters_are():
    for name, found in public():
        if inspect.isfunction(found) and "." not in name:
            for parameter in inspect.signature(found).parameters:
                if name not in ("full_copies",):  # it refers to assert_no_full_copy
                    assert re.search(rf"^      {parameter}: |^  {parameter}: |^    {parameter}: ",
                                     inspect.getdoc(found) + "\n" + found.__doc__, re.M), (name, parameter)  # fmt: skip


def test_what_is_exported_is_what_is_public():
    modules = {path.stem for path in SOURCE.glob("*.py")}
    assert {name for name in modules if not name.startswith("_")} == {"testing"}
    names = {name for name in vars(ms) if not name.startswith("_")} - {"testing"}
    assert names == set(ms.__all__) and ms.__all__ == sorted(ms.__all__)
    for result in (
        ms.Memory,
        ms.ProgramMemory,
        ms.Leaf,
        ms.Table,
        ms.Totals,
        ms.FullCopies,
        ms.FullCopy,
    ):
        assert inspect.isclass(result)
    assert issubclass(ms.UnparsedCollectiveWarning, UserWarning)


def test_functions_return_what_is_exported():
    """Types that a signature names can be imported from the package."""
    for _name, found in public():
        if not inspect.isfunction(found):
            continue
        returns = str(inspect.signature(found).return_annotation)
        for word in re.findall(r"\b[A-Z]\w+", returns):
            assert word in ms.__all__ or word in ("None", "Collective"), (found, word)


def test_the_version_is_that_of_the_distribution():
    assert ms.__version__ == importlib.metadata.version("meshscope")
    assert re.fullmatch(r"\d+\.\d+\.\d+", ms.__version__)


def test_only_one_module_touches_private_names_of_jax():
    private = re.compile(
        r"jax\._src|jaxlib|jax\.(core|interpreters)\b|\._device_assignment|\bvma\b"
    )
    for path in sorted(SOURCE.glob("*.py")):
        code = "\n".join(
            ast.unparse(node) for node in ast.parse(path.read_text("utf-8")).body
            if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        )  # fmt: skip
        assert bool(private.search(code)) == (path.name == "_compat.py"), path.name


def test_nothing_but_jax_is_needed():
    program = (
        "import sys, meshscope\n"
        "heavy = {'flax', 'IPython', 'matplotlib', 'optax', 'pandas', 'orbax'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    allowed = {"jax", "numpy", "meshscope", *sys.stdlib_module_names}
    for path in SOURCE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert {name.partition(".")[0] for name in names} <= allowed, path.name


def test_pytest_is_told_of_the_plugin():
    """By the name of its module, so that `-p pytest_meshscope` does not load it a second time."""
    project = tomllib.loads((SOURCE.parent.parent / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"pytest_meshscope": "pytest_meshscope"}
    program = "import sys, meshscope.testing; assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_importing_starts_no_backend():
    """The number of simulated devices can still be said afterwards."""
    program = (
        "import jax, meshscope\n"
        "jax.config.update('jax_platforms', 'cpu')\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "assert jax.device_count() == 3\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_results_can_be_kept():
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    drawing = ms.show(mesh)
    leaf = ms.Leaf("w", (8,), "float32", jax.P("data"), 16, 4, True, 32, 128)
    for result in (drawing, leaf, ms.Memory((leaf,), 16), ms.ProgramMemory(1, 2, 3, 4)):
        assert pickle.loads(pickle.dumps(result)) == result


README = SOURCE / "README.md"
PAGE = SOURCE.parents[1] / "book" / "reference" / "instruments.md"


@pytest.mark.skipif(not PAGE.exists(), reason="it is no part of the wheel")
def test_the_page_of_the_instruments_documents_what_a_test_holds_to():
    """Each of these names by its docstring, and each function of meshscope.testing."""
    documented = re.findall(r"^\.\. auto(?:function|class):: (\w+)$", PAGE.read_text("utf-8"), re.M)
    names = ["overlap", "Overlaps", "Overlap", "expect", "at_most", "about", "Bound"]
    for name in [*names, *importlib.import_module("meshscope.testing").__all__]:
        assert documented.count(name) == 1, name


@pytest.mark.skipif(not README.exists(), reason="it is no part of the wheel")
def test_the_readme_gives_what_it_says():
    program = (
        "import doctest, sys\n"
        "found = doctest.testfile(sys.argv[1], module_relative=False, optionflags=doctest.ELLIPSIS)\n"
        "print(found)\n"
        "sys.exit(bool(found.failed) or found.attempted < 10)\n"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program, str(README)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(not README.exists(), reason="it is no part of the wheel")
def test_what_the_metadata_says_is_so():
    settings = tomllib.loads((SOURCE.parent.parent / "pyproject.toml").read_text("utf-8"))
    project = settings["project"]
    assert project["readme"] == "src/meshscope/README.md" and project["dynamic"] == ["version"]
    assert "pip install meshscope" in README.read_text("utf-8")
    author = re.search(
        r"^author: (.*)$", (SOURCE.parent.parent / "_config.yml").read_text("utf-8"), re.M
    )
    assert project["authors"] == [{"name": author[1]}]
    pythons = {
        line.rsplit(" ", 1)[1] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)
    }
    assert pythons == {"3.11", "3.12", "3.13"} and "Typing :: Typed" in project["classifiers"]
    assert (SOURCE / "py.typed").exists()
    assert settings["build-system"]["requires"][0].startswith("hatchling=="), (
        "the wheel's bytes are pinned"
    )
