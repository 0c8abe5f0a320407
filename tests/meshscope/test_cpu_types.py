"""Types that programs compiled for CPU send as wider ones: each is measured, and a table says so beside the bytes."""

import gzip
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshscope as ms
from meshscope import _cpu, _hlo

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
LINE = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
RING = [(n, (n + 1) % 8) for n in range(8)]
# By name: the collective, and whether each device begins with a piece or with all of x.
KINDS = {
    "all_gather": (lambda x: jax.lax.all_gather(x, "data", tiled=True), P("data"), P()),
    "psum": (lambda x: jax.lax.psum(x, "data"), P("data"), P()),
    "pmax": (lambda x: jax.lax.pmax(x, "data"), P("data"), P()),
    "psum_scatter": (lambda x: jax.lax.psum_scatter(x, "data", tiled=True), P(), P("data")),
    "ppermute": (lambda x: jax.lax.ppermute(x, "data", RING), P("data"), P("data")),
    "all_to_all": (lambda x: jax.lax.all_to_all(x, "data", 0, 0, tiled=True), P("data"), P("data")),
}
PIECE, WHOLE = 8 * 128, 64 * 128  # elements of the value that payload_bytes measures
ELEMENTS = {"all_gather": WHOLE, "psum_scatter": WHOLE}
WIDENED = {  # to what, and how many times the bytes that is
    "bfloat16": ("float32", 2),
    "float8_e8m0fnu": ("float32", 4),
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e5m2fnuz", "float8_e4m3fnuz",
         "float8_e3m4", "float8_e4m3"), ("float16", 2)),
    "float4_e2m1fn": ("float16", 4),
    "int4": ("int8", 2),
    "uint4": ("uint8", 2),
}  # fmt: skip
KEPT = ("float32", "float16", "int8", "uint8", "int16", "int32", "uint32")


def bits(dtype):
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).bits


def sharded(spec, dtype="float32"):
    return jax.ShapeDtypeStruct((64, 128), jnp.dtype(dtype), sharding=NamedSharding(LINE, spec))


def compiled(f, spec, out, dtype="float32"):
    mapped = jax.shard_map(f, mesh=LINE, in_specs=spec, out_specs=out, check_vma=False)
    return jax.jit(mapped).lower(sharded(spec, dtype)).compile()


def gathered(*dtypes):
    """A program that casts float32 to each of these, gathers it, and casts it back."""

    def f(x):
        return sum(
            jax.lax.all_gather(x.astype(d), "data", tiled=True).astype("float32") for d in dtypes
        )

    return compiled(f, P("data"), P())


def note(*dtypes):
    told = [f"{d} as {WIDENED[d][0]} ({WIDENED[d][1]} times the bytes)" for d in dtypes]
    return f"CPU sends {', '.join(told)}"


def notes(table):
    return [line for line in repr(table).split("\n") if "CPU sends" in line or "for CPU" in line]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", WIDENED)
def test_a_type_is_sent_as_a_wider_one(dtype, kind):
    f, spec, out = KINDS[kind]
    (row,) = rows = ms.collectives(compiled(f, spec, out, dtype))
    wide, times = WIDENED[dtype]
    assert row.dtype == wide
    assert row.payload_bytes == times * ELEMENTS.get(kind, PIECE) * bits(jnp.dtype(dtype)) // 8
    for table in (rows, rows.by("kind"), ms.diff(rows[:0], rows)):
        assert repr(table).split("\n")[1] == note(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", KEPT)
def test_other_types_are_sent_as_they_are(dtype, kind):
    f, spec, out = KINDS[kind]
    (row,) = rows = ms.collectives(compiled(f, spec, out, dtype))
    assert row.dtype == dtype
    assert row.payload_bytes == ELEMENTS.get(kind, PIECE) * bits(jnp.dtype(dtype)) // 8
    assert not notes(rows)


def test_the_table_names_the_types_that_were_measured():
    assert {(_hlo.dtype(e), _hlo.dtype(_cpu.sent_as(e))) for e in (
        "bf16", "f8e8m0fnu", "f8e4m3fn", "f8e5m2", "f8e4m3b11fnuz", "f8e5m2fnuz", "f8e4m3fnuz", "f8e3m4", "f8e4m3",
        "f4e2m1fn", "s4", "u4",
    )} == {(narrow, wide) for narrow, (wide, _) in WIDENED.items()}  # fmt: skip
    assert not any(
        map(
            _cpu.sent_as, ("f16", "f32", "f64", "s8", "u8", "s32", "u32", "pred", "s2", "u2", "c64")
        )
    )


@pytest.mark.parametrize("dtype", WIDENED)
def test_a_type_that_only_the_middle_of_a_program_has_is_found(dtype):
    """Arguments and results are float32: quantised traffic."""
    rows = ms.collectives(gathered(dtype))
    assert notes(rows) == [note(dtype)]
    wide, times = WIDENED[dtype]
    assert [(row.dtype, row.payload_bytes) for row in rows] == [
        (wide, times * WHOLE * bits(jnp.dtype(dtype)) // 8)
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int4"])
def test_a_gather_that_the_compiler_adds_is_no_other(dtype):
    split, whole = (NamedSharding(LINE, spec) for spec in (P("data"), P()))

    def f(w):
        w = jax.lax.with_sharding_constraint(w.astype(dtype), split)
        return jax.lax.with_sharding_constraint(w, whole).astype("float32") * 2

    program = (
        jax.jit(f, in_shardings=split, out_shardings=whole).lower(sharded(P("data"))).compile()
    )
    rows = ms.collectives(program)
    assert {row.dtype for row in rows} == {WIDENED[dtype][0]} and notes(rows) == [note(dtype)]


def test_several_types_are_named_in_one_line():
    rows = ms.collectives(gathered("int4", "float8_e4m3fn", "float4_e2m1fn"))
    assert notes(rows) == [note("float4_e2m1fn", "float8_e4m3fn", "int4")]
    # and a part of the rows has its own
    eight = [n for n, row in enumerate(rows) if row.dtype == "int8"]
    assert len(eight) == 1 and notes(rows[eight[0] : eight[0] + 1]) == [note("int4")]


def test_nothing_is_said_where_no_bytes_are_wider():
    assert not notes(ms.collectives(gathered("float32")))

    def moves_integers(x):
        return jax.lax.psum(jnp.int32(x[0, 0]), "data") + x.astype("bfloat16").sum()

    rows = ms.collectives(compiled(moves_integers, P("data"), P()))
    assert {row.dtype for row in rows} == {"int32"} and not notes(rows)

    def moves_nothing(x):
        return jax.lax.psum(x.astype("bfloat16"), "one").astype("float32")

    pair = jax.make_mesh((8, 1), ("data", "one"), axis_types=(AxisType.Auto,) * 2)
    mapped = jax.shard_map(
        moves_nothing, mesh=pair, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    x = jax.ShapeDtypeStruct((64, 128), "float32", sharding=NamedSharding(pair, P("data")))
    assert not notes(ms.collectives(jax.jit(mapped).lower(x).compile()))


def test_a_difference_has_the_lines_of_both_programs():
    half, eight, full = gathered("bfloat16"), gathered("float8_e4m3fn", "int4"), gathered("float32")
    assert set(notes(ms.diff(half, eight))) == {note("bfloat16"), note("float8_e4m3fn", "int4")}
    assert (
        notes(ms.diff(full, eight))
        == notes(ms.diff(eight, full))
        == [note("float8_e4m3fn", "int4")]
    )
    # On CPU float32 and bfloat16 move the same bytes, and nowhere else.
    same = ms.diff(full, half)
    assert not same and repr(same).startswith("No difference") and notes(same) == [note("bfloat16")]
    assert not notes(ms.diff(full, full))


def test_a_text_that_may_be_for_cpu_says_what_cpu_would_send():
    text = gathered("bfloat16").as_text()
    assert notes(ms.collectives(text, LINE)) == [
        note("bfloat16").replace("CPU sends", "If compiled for CPU, it sends")
    ]
    assert not notes(ms.collectives(gathered("float32").as_text(), LINE))


def test_a_text_that_sends_the_type_itself_is_not_for_cpu():
    lines = [
        f"%{t}s = {t}[8]{{0}} collective-permute(%{t}p), source_target_pairs={{{{0,1}}}}"
        for t in ("bf16", "f32")
    ]
    given = [f"%{t}p = {t}[8]{{0}} parameter({n})" for n, t in enumerate(("bf16", "f32"))]
    text = "HloModule m, is_scheduled=true, num_partitions=8\n\nENTRY %main (p: bf16[8], q: f32[8]) -> f32[8] {\n  "
    rows = ms.collectives(text + "\n  ".join([*given, *lines]) + "\n}\n", LINE)
    assert [row.dtype for row in rows] == ["bfloat16", "float32"] and not notes(rows)
    assert notes(ms.collectives(text + "\n  ".join([*given, lines[1]]) + "\n}\n", LINE))


@pytest.mark.parametrize("platform", ["tpu", "gpu", "cuda", "rocm"])
def test_a_compiled_program_of_another_platform_has_no_wider_types(platform):
    text = gathered("bfloat16").as_text()
    program = _hlo.parse(text)
    assert _cpu.widened(program, text, "cpu").note({"float32"})
    assert _cpu.widened(program, text, platform).note({"float32"}) is None


def test_programs_for_other_backends_say_nothing():
    """They send bfloat16 as it is; also where float32 is sent beside it, or alone."""
    sent = set()
    for path in sorted(FIXTURES.glob("**/*.hlo.gz")):
        text = gzip.decompress(path.read_bytes()).decode()
        meshes = AbstractMesh((8,), ("data",)), AbstractMesh((2, 2, 2), ("a", "b", "c"))
        rows = ms.collectives(text, meshes["cube" in path.name])
        sent |= {row.dtype for row in rows}
        assert not notes(rows), path
    assert {"bfloat16", "float32"} <= sent


def test_the_page_of_the_instruments_has_the_table_and_what_is_printed():
    page = (pathlib.Path(__file__).parents[2] / "book" / "reference" / "instruments.md").read_text(
        "utf-8"
    )
    section = page.split("### Bytes of programs compiled for CPU\n")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.split("\n")
        if line.startswith("| ")
    ]
    told = {}
    for written, sent, factor in rows[1:-1]:
        names = [name for name in WIDENED if re.match(r"float8(?!_e8m0)", name)]
        names = names if written == "float8, except float8_e8m0fnu" else written.split(", ")
        wide = sent.split(", ") * (len(names) // len(sent.split(", ")))
        told |= {name: (as_, int(factor.split()[0])) for name, as_ in zip(names, wide)}
    assert told == WIDENED
    assert set(rows[-1][0].split(", ")) <= set(KEPT) and rows[-1][1:] == ["the same", "unchanged"]
    eight = jax.jit(lambda x: x, out_shardings=NamedSharding(LINE, P()))
    table = ms.collectives(eight.lower(sharded(P("data"), "float8_e4m3fn")).compile()).by(
        "kind", "axes"
    )
    assert re.search(r"```text\n(.*?)\n```", section, re.S)[1] == re.sub(
        r"\(jax .*?\)", "(jax 0.12.0.1)", repr(table)
    )
