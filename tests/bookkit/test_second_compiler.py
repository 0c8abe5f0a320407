"""Programs that are compiled a second time: what is noted, the check, and the claims."""

import re
import shutil

import pytest

from bookkit.compilers import second_compiler
from bookkit.compilers.claims import Claim, digest_of_code, judge, load_rows, load_table
from bookkit.model.book import Book, Problem
from toy import FRONT, ROOT, code

BOOK = Book()
SHOWN = """\
import jax, jax.numpy as jnp
P = jax.P
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.device_put(jnp.ones((64, 16)), jax.NamedSharding(mesh, P("data")))
def column_sums(x):
    return x.sum(0)
"""
EXERCISE = "\n\n".join([code("answer_a = None", "exercise-a"), code("raise Missing", "check-a")])
TABLE = """
[program.sums]
page = "book/01-toy"
after = "sums"
make = "column_sums, x"

[program.compiled]
page = "book/01-toy"
after = "sums"
make = '''
with jax.set_mesh(mesh):
    found = jax.jit(column_sums).lower(x).compile()
found
'''

[program.large]
page = "book/01-toy"
after = "sums"
machine = "v5e:4x4"
make = '''
kind = (jax.sharding.AxisType.Auto,)
wide = jax.sharding.AbstractMesh((16,), ("data",), axis_types=kind)
rows = jax.ShapeDtypeStruct((64, 16), "float32", sharding=jax.NamedSharding(wide, P("data")))
jax.jit(column_sums), rows
'''

[[claim]]
page = "book/01-toy"
says = "A sum of columns is reduced once (payload)."
value = "payload('sums')"
holds = "value == 64 and kinds('sums') == 'all-reduce'"
"""
PAGE = """# Three compilers

<!-- made by bookkit second-compiler -->
<!-- end -->
"""


def toy(folder, shown=SHOWN, table=TABLE):
    """A book with one chapter, whose function is compiled, and the page of claims."""
    for name in ("book/compiled", "book/reference", "companion/many_devices"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "_config.yml").write_text(
        "html: {baseurl: 'https://x.org/'}\nsphinx: {config: {book_languages: {}}}\n"
    )
    (folder / "_toc.yml").write_text(
        "format: jb-book\nroot: book/01-toy\nchapters: [{file: book/reference/two-compilers}]\n"
    )
    chapter = [FRONT, "# A toy", EXERCISE, code(shown, "id-sums")]
    (folder / "book" / "01-toy.md").write_text("\n\n".join(chapter) + "\n")
    if not (folder / "book" / "reference" / "two-compilers.md").exists():
        (folder / "book" / "reference" / "two-compilers.md").write_text(PAGE)
    (folder / "book" / "compiled" / "claims.toml").write_text(table)
    return Book(folder)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A toy book whose programs were stored; what the other compilers made is what CPU's did."""
    book = toy(tmp_path_factory.mktemp("book"))
    asked, _ = load_table(book)
    found, problems = second_compiler.compiled(book, asked.values(), None)
    assert problems == []
    programs = {
        name: {
            **entry,
            "tpu": entry.get("cpu"),
            "gpu": entry.get("cpu"),
            "code": digest_of_code(book, asked[name]),
        }
        for name, entry in found.items()
    }
    others = {"libtpu": "1", "jax-cuda13-pjrt": "2", "topology": "v5e:2x4", "date": "2026-11-22"}
    about = {**second_compiler.releases(), **others}
    second_compiler.write_rows(book, {"about": about, "programs": programs})
    second_compiler.write_files(book, load_rows(book))
    return book


@pytest.fixture
def book(stored, tmp_path):
    shutil.copytree(stored.root, tmp_path, dirs_exist_ok=True)
    return Book(tmp_path)


# Programs


def test_a_function_and_a_compiled_program_are_noted_alike(stored):
    """Exercises are not run: one of this page would raise."""
    programs = load_rows(stored)["programs"]
    one, other = programs["sums"], programs["compiled"]
    assert one["hash"] == other["hash"] and one["mesh"] == {"data": 8}
    [move] = one["cpu"]["moves"]
    assert (move["kind"], move["axes"], move["payload"]) == ("all-reduce", ["data"], 64)
    assert one["cpu"]["moves"] == other["cpu"]["moves"]
    assert one["cpu"]["memory"]["arguments"] == 64 * 16 * 4 // 8


def test_a_program_for_one_machine_is_hashed_from_shapes_and_not_compiled_for_cpu(stored):
    """Its mesh has more devices than are simulated."""
    large = load_rows(stored)["programs"]["large"]
    assert large["mesh"] == {"data": 16} and large["machine"] == "v5e:4x4" and not large["tpu"]


def test_code_that_was_compiled_is_not_run_again(book, monkeypatch):
    monkeypatch.setattr(second_compiler, "compiled", lambda *_: pytest.fail("a page was run"))
    assert second_compiler.check(book) == "3 programs, 1 claims; of changed code: none"


def test_a_changed_program_is_named_with_the_command(book):
    toy(book.root, SHOWN.replace("x.sum(0)", "2 * x.sum(0)"))
    with pytest.raises(Problem) as problem:
        second_compiler.check(Book(book.root))
    said = str(problem.value)
    assert "book/01-toy.md: the program sums (after the cell id-sums)" in said
    assert "run `make second-compiler`" in said and "the program large" in said


def test_other_code_for_the_same_program_passes_and_is_noted(book, monkeypatch):
    toy(book.root, "# in other words\n" + SHOWN.replace("def column_sums", "\n\ndef column_sums"))
    other = Book(book.root)
    assert "3, of which 3 make the same program (--note" in second_compiler.check(other)
    second_compiler.check(other, note=True)
    monkeypatch.setattr(second_compiler, "compiled", lambda *_: pytest.fail("a page was run again"))
    assert second_compiler.check(other).endswith("none")


def test_other_releases_say_so_instead_of_checking(book, monkeypatch):
    toy(book.root, SHOWN.replace("x.sum(0)", "x.sum(1)"))
    other = dict.fromkeys(second_compiler.LOWERED_BY, "0")
    monkeypatch.setattr(second_compiler, "releases", lambda: other)
    assert "not checked here" in second_compiler.check(Book(book.root))


@pytest.mark.parametrize(
    ("shown", "table", "said"),
    [
        (SHOWN + "\nraise ValueError('no')\n", TABLE, r"book/01-toy, cell 4: ValueError: no"),
        (SHOWN, TABLE.replace("column_sums, x", "x + 1"), r"sums: ValueError: lowers 0 programs"),
        (SHOWN, TABLE.replace("[program.compiled]", "[program.other]"), r"\(compiled, other\)"),
        (SHOWN, TABLE.replace('"sums"', '"gone"', 1), r"cell id-gone, which book/01-toy\.md"),
        (SHOWN, TABLE.replace("says =", "said ="), r"claims\.toml cannot be read"),
        (SHOWN, TABLE.replace("payload(", "pay(", 1), r"\"pay.*reduced once.*NameError"),
    ],
)
def test_a_mistake_is_told_with_its_place(book, shown, table, said):
    toy(book.root, shown, table)
    with pytest.raises(Problem, match=said):
        second_compiler.check(Book(book.root))


def test_without_a_compiler_compiling_says_what_to_do(book, tmp_path):
    with pytest.raises(Problem, match=r"holds no libtpu, jax-cuda13-pjrt: `make second-compiler`"):
        second_compiler.compile_all(book, tmp_path, [])


def test_the_page_and_the_table_are_found_out_of_date_and_written(book):
    path, page = book.root / "book/compiled/claims.csv", book.source(second_compiler.CLAIMS_PAGE)
    text = path.read_text()
    assert "\n01-toy,A sum of columns is reduced once (payload).,64,64,64,holds\n" in text
    path.write_text(text.replace("64", "65"))
    page.write_text(page.read_text().replace("programs", "things"))
    out_of_date = r"(?s)two-compilers.md is out of date.*claims.csv is out of date"
    with pytest.raises(Problem, match=out_of_date):
        second_compiler.check(book)
    second_compiler.check(book, note=True)
    assert path.read_text() == text and "about 2 programs" in page.read_text()


# Claims


def program(*moves):
    names = ("kind", "axes", "dtype", "executions", "payload", "wire")
    return {"moves": [dict(zip(names, move, strict=True)) for move in moves]}


GATHER = ("all-gather", ["data"], "float32", 2, 64, 56)
THREE = {
    "a": {
        "cpu": program(GATHER, ("all-reduce", ["model"], "float32", 1, 8, 12)),
        "tpu": program(("all-gather", ["data"], "bfloat16", None, None, None)),
        "gpu": program(GATHER),
    }
}


def claim(value, holds, **more):
    return Claim("book/01-toy", "It is so.", value, holds, **more)


SENT, KINDS = ("sent('a')", "value == 68"), ("kinds('a')", "'all-gather' in value")


@pytest.mark.parametrize(
    ("one", "wrong"),
    [
        (claim(*KINDS), ""),
        (claim(*SENT, why="So.", why_gpu="So."), ""),
        (claim(*KINDS, why="So."), "holds for TPU as well: take its `why` out"),
        (claim(*SENT, why="So."), "does not hold for GPU (56): say `why_gpu`"),
        (claim(*SENT, why_gpu="So."), "does not hold for TPU (unknown): say `why`"),
        (claim("sent('a')", "value == 1"), "does not hold for CPU: 68"),
        (claim("sent('a')", "value == 1", about="tpu"), "does not hold for TPU: unknown"),
    ],
)
def test_what_is_wrong_with_a_claim(one, wrong):
    """How true ones are told is seen in book/compiled/claims.csv, which is checked."""
    problems = second_compiler.misjudged(judge([one], THREE))
    assert wrong in "\n".join(problems) and bool(problems) == bool(wrong)


def test_stored_with_the_pinned_releases():
    """`make lint` checks the book's own programs; here, that they are of the releases it pins."""
    about = load_rows(BOOK)["about"]
    for file, names in (
        ("requirements.txt", ("jax", "jaxlib", "flax")),
        ("requirements-compilers.txt", second_compiler.OTHER_COMPILERS),
    ):
        text = (ROOT / file).read_text("utf-8")
        for name in names:
            pinned = rf"(?m)^{name}=={re.escape(about[name])}(?![\w.])"
            assert re.search(pinned, text), f"run `make second-compiler`: {name}"
