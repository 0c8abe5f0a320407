"""Programs that are compiled a second time: their hashes, what is stored, the claims, and the check."""

import importlib.metadata
import json
import re
import shutil

import jax
import pytest

from bookkit.compilers import second_compiler
from bookkit.compilers.two_programs import schedule
from bookkit.model.book import Book, Problem
from bookkit.model.chapter import load_chapter
from bookkit.model.compiled import (
    Comparison,
    Measured,
    as_shown,
    cells_before,
    digest_of_code,
    judge,
    load_rows,
    load_table,
    rows_path,
)
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
    for name in ("compiled", "reference"):
        (folder / "book" / name).mkdir(parents=True, exist_ok=True)
    (folder / "companion" / "many_devices").mkdir(parents=True, exist_ok=True)
    (folder / "_config.yml").write_text(
        "html: {baseurl: 'https://x.org/'}\nsphinx: {config: {book_languages: {}}}\n"
    )
    (folder / "_toc.yml").write_text(
        "format: jb-book\nroot: book/01-toy\nchapters: [{file: book/reference/two-compilers}]\n"
    )
    (folder / "book" / "01-toy.md").write_text(f"{FRONT}\n# A toy\n\n{code(shown, 'id-sums')}\n")
    if not (folder / "book" / "reference" / "two-compilers.md").exists():
        (folder / "book" / "reference" / "two-compilers.md").write_text(PAGE)
    (folder / "book" / "compiled" / "claims.toml").write_text(table)
    load_chapter.cache_clear()  # the same path, another page
    return Book(folder)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A toy book whose programs were stored; what the other compilers made is what CPU's did."""
    book = toy(tmp_path_factory.mktemp("book"))
    asked = load_table(book)
    found, problems = second_compiler.noted(book, list(asked.programs.values()), None)
    assert problems == []
    programs = {
        name: {
            "page": asked.programs[name].page,
            "after": "sums",
            **entry,
            "tpu": entry["cpu"],
            "gpu": entry["cpu"],
            "code": digest_of_code(book, asked.programs[name]),
        }
        for name, entry in found.items()
    }
    about = {
        **second_compiler.releases(),
        "libtpu": "1",
        "jax-cuda13-pjrt": "2",
        "topology": "v5e:2x4",
        "date": "2026-11-22",
    }
    rows_path(book).write_text(second_compiler.as_text({"about": about, "programs": programs}))
    second_compiler.main_page(book)
    return book


@pytest.fixture
def book(stored, tmp_path):
    shutil.copytree(stored.root, tmp_path, dirs_exist_ok=True)
    return Book(tmp_path)


# Programs


def test_a_program_for_one_machine_is_hashed_from_shapes_and_not_compiled_for_cpu(tmp_path):
    """Its mesh has more devices than are simulated, and the page's other programs do not change."""
    table = (
        TABLE
        + """
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
"""
    )
    book = toy(tmp_path, table=table)
    program = load_table(book).programs["large"]
    found, problems = second_compiler.noted(book, [program], None)
    assert problems == []
    assert found["large"].keys() == {"hash", "mesh", "machine"}
    assert found["large"]["mesh"] == {"data": 16}


def test_a_function_and_a_compiled_program_are_noted_alike(stored):
    one, other = load_rows(stored)["programs"].values()
    assert one["hash"] == other["hash"] and one["mesh"] == {"data": 8}
    [move] = one["cpu"]["moves"]
    assert (move["kind"], move["axes"], move["payload"], move["executions"]) == (
        "all-reduce",
        ["data"],
        64,
        1,
    )
    assert one["cpu"]["moves"] == other["cpu"]["moves"]
    assert one["cpu"]["memory"]["arguments"] == 64 * 16 * 4 // 8


WIDE = """
[program.wide]
page = "book/01-toy"
after = "sums"
devices = 16
make = '''
mesh = jax.make_mesh((16,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.ShapeDtypeStruct((64, 16), "float32", sharding=jax.NamedSharding(mesh, P("data")))
column_sums, x
'''
"""


def test_a_program_can_have_more_devices_than_the_page(tmp_path):
    book = toy(tmp_path, table=WIDE)
    page = book.source("book/01-toy")
    setup = (ROOT / "companion" / "setup_cell.py").read_text("utf-8")
    shown = code(setup.rstrip("\n"), "setup") + "\n\n" + code(SHOWN, "id-sums")
    page.write_text(f"{FRONT}\n# A toy\n\n{shown}\n")
    load_chapter.cache_clear()
    found, problems = second_compiler.noted(book, [*load_table(book).programs.values()], None)
    assert problems == [] and found["wide"]["mesh"] == {"data": 16}
    assert found["wide"]["cpu"]["memory"]["arguments"] == 64 * 16 * 4 // 16


def test_code_that_was_compiled_is_not_run_again(book, monkeypatch):
    monkeypatch.setattr(second_compiler, "noted", lambda *_: pytest.fail("a page was run"))
    assert second_compiler.check(book).endswith("of changed code: none")


def test_a_changed_program_is_named_with_the_command(book):
    toy(book.root, SHOWN.replace("x.sum(0)", "2 * x.sum(0)"))
    with pytest.raises(Problem) as problem:
        second_compiler.check(Book(book.root))
    said = str(problem.value)
    assert "book/01-toy.md: the program sums (after the cell id-sums)" in said
    assert "run `make second-compiler`" in said and "the program compiled" in said


def test_other_code_for_the_same_program_passes_and_is_noted(book, monkeypatch):
    toy(book.root, "# in other words\n" + SHOWN.replace("def column_sums", "\n\ndef column_sums"))
    other = Book(book.root)
    before = load_rows(other)["programs"]["sums"]["code"]
    assert "2, of which 2 make the same program (--note" in second_compiler.check(other)
    second_compiler.check(other, note=True)
    after = load_rows(other)["programs"]["sums"]
    assert after["code"] == digest_of_code(other, load_table(other).programs["sums"]) != before
    monkeypatch.setattr(second_compiler, "noted", lambda *_: pytest.fail("a page was run again"))
    assert second_compiler.check(other).endswith("none")


def test_other_releases_say_so_instead_of_checking(book, monkeypatch):
    toy(book.root, SHOWN.replace("x.sum(0)", "x.sum(1)"))
    monkeypatch.setattr(
        second_compiler, "releases", lambda: dict.fromkeys(second_compiler.LOWERED_BY, "0")
    )
    assert "not checked here" in second_compiler.check(Book(book.root))


def test_an_error_in_a_page_or_in_make_is_told_with_its_place(book):
    toy(book.root, SHOWN + "\nraise ValueError('no')\n")
    with pytest.raises(Problem, match=r"book/01-toy, cell 2: ValueError: no"):
        second_compiler.check(Book(book.root))
    toy(book.root, table=TABLE.replace('make = "column_sums, x"', 'make = "x + 1"'))
    with pytest.raises(Problem, match=r"program sums: ValueError: lowers 0 programs"):
        second_compiler.check(Book(book.root))


def test_what_is_listed_and_what_is_stored_must_agree(book):
    toy(book.root, table=TABLE.replace("[program.compiled]", "[program.other]"))
    with pytest.raises(Problem, match=r"list other programs \(other, compiled\)"):
        second_compiler.check(Book(book.root))


def test_a_cell_that_is_not_there_is_named(book):
    toy(book.root, table=TABLE.replace('after = "sums"', 'after = "gone"', 1))
    with pytest.raises(
        Problem, match=r"program sums asks for the cell id-gone, which book/01-toy.md"
    ):
        load_table(Book(book.root))
    toy(book.root, table=TABLE.replace("says =", "said ="))
    with pytest.raises(Problem, match=r"claims.toml cannot be read"):
        load_table(Book(book.root))


@pytest.mark.parametrize("missing", second_compiler.OTHER_COMPILERS)
def test_without_a_compiler_compiling_says_what_to_do(book, tmp_path, missing):
    for name in second_compiler.OTHER_COMPILERS:
        if name != missing:
            (tmp_path / f"{name.replace('-', '_')}-1.0.dist-info").mkdir()
    with pytest.raises(Problem, match=rf"holds no {missing}: `make second-compiler`"):
        second_compiler.compile_all(book, load_table(book), tmp_path, [], 1)


def test_exercises_are_not_run(tmp_path):
    book = toy(tmp_path)
    source = book.source("book/01-toy")
    source.write_text(
        source.read_text().replace(
            "# A toy",
            "\n\n".join(
                [
                    "# A toy",
                    code("answer_a = None", "exercise-a"),
                    code("y = 1", "id-c"),
                ]
            ),
        )
    )
    [program, _] = load_table(book).programs.values()
    assert [cell.slug for cell in cells_before(book, program)] == ["c", "sums"]


# Claims


def program(*moves, refused="", temporaries=0):
    rows = [
        dict(kind=kind, axes=axes, dtype=dtype, executions=n, payload=size, wire=wire)
        for kind, axes, dtype, n, size, wire in moves
    ]
    return (
        {"refused": refused} if refused else {"moves": rows, "memory": {"temporaries": temporaries}}
    )


THREE = {
    "a": {
        "cpu": program(
            ("all-gather", ["data"], "float32", 2, 64, 56),
            ("all-reduce", ["model"], "float32", 1, 8, 12),
        ),
        "tpu": program(("all-gather", ["data"], "bfloat16", None, None, None)),
        "gpu": program(("all-gather", ["data"], "float32", 2, 64, 56)),
    },
    "b": {
        "cpu": program(temporaries=5),
        "tpu": program(refused="too large"),
        "gpu": program(temporaries=7),
    },
}


def test_what_claims_are_measured_with():
    on_cpu, on_tpu = (Measured(THREE, compiler) for compiler in ("cpu", "tpu"))
    assert (
        on_cpu.sent("a"),
        on_cpu.sent("a", "all-gather"),
        on_cpu.payload("a", None, "model"),
    ) == (68, 56, 8)
    assert (on_cpu.sent("a", None, None, "bfloat16"), on_cpu.executions("a", "all-gather")) == (
        0,
        2,
    )
    assert (on_tpu.sent("a"), on_tpu.dtypes("a"), on_tpu.kinds("a")) == (
        None,
        "bfloat16",
        "all-gather",
    )
    assert (on_cpu.kinds("b"), on_cpu.memory("b", "temporaries"), on_tpu.refused("b")) == (
        "none",
        5,
        "too large",
    )
    with pytest.raises(Problem, match="b was refused"):
        on_tpu.sent("b")
    with pytest.raises(Problem, match="no program c"):
        on_tpu.sent("c")


def claim(value, holds, **more):
    return Comparison("book/01-toy", "It is so.", value, holds, **more)


@pytest.mark.parametrize(
    ("one", "says"),
    [
        (claim("sent('a')", "value == 68", why="It differs.", why_gpu="It, too."), None),
        (
            claim("sent('a')", "value == 68", why="It differs."),
            r"does not hold for GPU \(56\): say `why_gpu`",
        ),
        (
            claim("sent('a')", "value == 68", why_gpu="It, too."),
            r"does not hold for TPU \(unknown\): say `why`",
        ),
        (
            claim("sent('a')", "value == 68", why="It differs.", not_for_gpu="not compiled."),
            None,
        ),
        (claim("sent('a')", "value == 1", why="It differs."), r"does not hold for CPU: 68"),
        (claim("kinds('a')", "'all-gather' in value"), None),
        (claim("kinds('a')", "'all-gather' in value", why="It differs."), r"holds for TPU as well"),
        (
            claim("kinds('a')", "'all-gather' in value", why_gpu="It differs."),
            r"holds for GPU as well: take its `why_gpu` out",
        ),
        (claim("refused('b') or 0", "refused('b')", about="tpu"), None),
        (claim("sent('a')", "value == 1", about="tpu"), r"does not hold for TPU"),
    ],
)
def test_claims_are_judged_on_each(one, says):
    asked = second_compiler.Asked({}, [one])
    problems = second_compiler.misjudged(judge(asked, THREE))
    assert bool(problems) == bool(says)
    assert not says or re.search(says, problems[0])


def test_an_expression_that_fails_is_named():
    with pytest.raises(Problem, match=r"'sent\(' of the claim 'It is so.': SyntaxError"):
        judge(second_compiler.Asked({}, [claim("sent(", "True")]), THREE)


def test_differences_are_listed_by_claim():
    asked = second_compiler.Asked({}, [claim("kinds('a')", "'all-gather' in value")])
    old = {"about": {"jax": "1", "date": "x"}, "programs": json.loads(json.dumps(THREE))}
    for entry in old["programs"].values():
        entry["hash"] = "0"
    new = json.loads(json.dumps(old))
    assert second_compiler.changed_since(asked, old, new) == []
    new["about"] = {"jax": "2", "date": "y"}
    new["programs"]["a"]["tpu"] = program(("all-reduce", ["data"], "float32", 1, 1, 1))
    assert second_compiler.changed_since(asked, old, new) == [
        "jax: 1 → 2",
        "claim: book/01-toy: It is so. TPU: all-gather → all-reduce — it holds no longer as stored",
        "program a: its tpu is another",
    ]


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (claim("kinds('a')", "'all-gather' in value"), "holds"),
        (
            claim("kinds('a')", "'all-gather' in value", not_for_gpu="not compiled."),
            "holds. GPU: not compiled.",
        ),
        (claim("sent('a')", "value == 68", why="So.", why_gpu="So."), "differs. So."),
        (
            claim("sent('a')", "value == 68", why="So.", why_gpu="Not so."),
            "TPU: differs. So. GPU: differs. Not so.",
        ),
        (claim("dtypes('a')", "value == 'float32'", why="So."), "TPU: differs. So."),
        (claim("dtypes('a')", "value == 'bfloat16'", about="tpu"), "holds on TPU only"),
        (
            claim("payload('a', 'all-reduce')", "value == 0", about="gpu"),
            "holds on TPU and GPU only",
        ),
    ],
)
def test_where_a_claim_holds_in_words(one, text):
    [judged] = judge(second_compiler.Asked({}, [one]), THREE)
    assert second_compiler.where_it_holds(judged) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(12345, "12,345"), (1.5, "1.50"), ([1, "x"], "1, x"), (None, "unknown"), (True, "yes")],
)
def test_values_as_the_page_shows_them(value, text):
    assert as_shown(value) == text


def test_the_page_and_the_table_are_written_and_found_out_of_date(book):
    path, page = second_compiler.table_path(book), book.source("book/reference/two-compilers")
    text = path.read_text()
    assert "\n01-toy,A sum of columns is reduced once (payload).,64,64,64,holds\n" in text
    path.write_text(text.replace("64", "65"))
    page.write_text(page.read_text().replace("programs", "things"))
    with pytest.raises(
        Problem, match=r"(?s)two-compilers.md is out of date.*claims.csv is out of date"
    ):
        second_compiler.check(book)


# The book's own


def test_thirty_claims_of_chapters_and_all_their_programs_are_stored():
    asked, rows = load_table(BOOK), load_rows(BOOK)
    assert set(asked.programs) == set(rows["programs"])
    assert len(asked.claims) >= 30 and len({claim.page for claim in asked.claims}) >= 8
    assert second_compiler.misjudged(judge(asked, rows["programs"])) == []


def test_stored_with_the_pinned_releases():
    about = load_rows(BOOK)["about"]
    pinned = (ROOT / "requirements.txt").read_text("utf-8")
    for name in ("jax", "jaxlib", "flax"):
        assert re.search(rf"^{name}=={re.escape(about[name])}\b", pinned, re.M), (
            f"run `make second-compiler`: {name}"
        )
    installed = (ROOT / "requirements-compilers.txt").read_text("utf-8")
    for name in second_compiler.OTHER_COMPILERS:
        assert f"{name}=={about[name]}\n" in installed
    assert about["jax-cuda13-pjrt"] == about["jaxlib"]
    if importlib.metadata.version("jax") == about["jax"]:
        wants = [
            need for need in importlib.metadata.requires("jax") or [] if need.startswith("libtpu")
        ]
        assert any(
            need.startswith(f"libtpu=={about['libtpu'].rsplit('.', 1)[0]}.") for need in wants
        )
    assert "libtpu" not in pinned


# What runs beside a collective


SCHEDULED = """HloModule jit_f, is_scheduled=true, num_partitions=8

%body.1 (p: (s32[], f32[4,2], f32[8,4])) -> (s32[], f32[4,2], f32[8,4]) {
  %p = (s32[], f32[4,2]{1,0}, f32[8,4]{1,0}) parameter(0)
  %piece = f32[4,2]{1,0} get-tuple-element(%p), index=1
  %x = f32[8,4]{1,0} get-tuple-element(%p), index=2
  %start.1 = ((f32[4,2]{0,1}), f32[4,16]{0,1}) all-gather-start(%piece), replica_groups={}, dimensions={1}
  %done.1 = f32[4,16]{0,1} all-gather-done(%start.1)
  %start.2 = ((f32[4,2]{0,1}), f32[32,2]{0,1}) all-gather-start(%piece), replica_groups={}, dimensions={0}
  %dot.1 = f32[8,16]{1,0} dot(%x, %done.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %done.2 = f32[32,2]{0,1} all-gather-done(%start.2)
  ROOT %t = (s32[], f32[4,2]{1,0}, f32[8,4]{1,0}) tuple(%p, %piece, %x)
}

%condition.1 (q: (s32[], f32[4,2], f32[8,4])) -> pred[] {
  %q = (s32[], f32[4,2]{1,0}, f32[8,4]{1,0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (init: (s32[], f32[4,2], f32[8,4])) -> (s32[], f32[4,2], f32[8,4]) {
  %init = (s32[], f32[4,2]{1,0}, f32[8,4]{1,0}) parameter(0)
  %piece.2 = f32[4,2]{1,0} get-tuple-element(%init), index=1
  %outside = f32[32,2]{1,0} all-gather(%piece.2), replica_groups={}, dimensions={0}
  ROOT %while.1 = (s32[], f32[4,2]{1,0}, f32[8,4]{1,0}) while(%init), condition=%condition.1, body=%body.1
}
"""


def test_the_matmuls_that_stand_between_the_lines_of_a_collective():
    """As meshscope reads them, which tests/meshscope/test_overlap.py checks; outside of loops, none."""
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    assert schedule(SCHEDULED, mesh) == [
        [0, "all-gather", [4, 16], []],
        [0, "all-gather", [32, 2], [0]],
    ]


def test_switches_of_the_compiler_are_part_of_what_a_program_is(book):
    asked = load_table(toy(book.root, table=TABLE + "\n[program.ahead]\npage = 'book/01-toy'\n"
                           "after = 'sums'\nmake = 'column_sums, x'\nswitches = { xla_flag = 'on' }\n"))  # fmt: skip
    plain, ahead = (asked.programs[name] for name in ("sums", "ahead"))
    assert digest_of_code(book, plain) != digest_of_code(book, ahead)
