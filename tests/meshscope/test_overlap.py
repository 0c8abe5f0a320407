"""What runs beside a collective: schedules that are known by construction, and those of compilers.

Programs by hand have matmuls of 32 x 64 by 64 x 128 numbers, 2 * 32 * 64 * 128 FLOPs each.
"""

import gzip
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import meshscope as ms
from meshscope import _hlo as hlo
from meshscope import _work

pytestmark = pytest.mark.filterwarnings("error::meshscope.UnparsedCollectiveWarning")
P = jax.P
LINE = AbstractMesh((8,), ("data",))
GRID = AbstractMesh((2, 4), ("data", "model"))
FIXTURES = pathlib.Path(__file__).parent / "fixtures"
MATMUL = 2 * 32 * 64 * 128

HEAD = """HloModule jit_f, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

"""
GATHER = "(bf16[64,128], bf16[512,128]) all-gather-start(%w), replica_groups={}, dimensions={0}"
DOT = "bf16[32,128] dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
START, DONE = f"%start = {GATHER}", "%done = bf16[512,128] all-gather-done(%start)"
SUM = "f32[64] add(%v, %v)"


def program(*lines, computations=""):
    """A program whose entry has these lines, and one more."""
    body = "".join(f"  {line}\n" for line in lines)
    return (
        f"{HEAD}{computations}ENTRY %main (w: bf16[64,128], x: bf16[32,64], v: f32[64]) -> f32[64] {{\n"
        "  %w = bf16[64,128] parameter(0)\n  %x = bf16[32,64] parameter(1)\n"
        f"  %v = f32[64] parameter(2)\n{body}  ROOT %last = f32[64] copy(%v)\n}}\n"
    )


def the_one(*lines, **more):
    (row,) = ms.overlap(program(*lines, **more), LINE)
    return row


# What stands between the two lines


def test_a_matmul_between_the_two_lines():
    row = the_one(START, f"%dot = {DOT}", DONE)
    assert (row.beside, row.matmuls, row.flops, row.other_bytes) == ("matmul", (0,), MATMUL, 0)
    assert row.hidden is True
    assert (row.kind, row.axes, row.dtype, row.shape) == (
        "all-gather", ("data",), "bfloat16", (512, 128))  # fmt: skip
    assert (row.payload_bytes, row.wire_bytes) == (512 * 128 * 2, 512 * 128 * 2 * 7 / 8)


def test_a_matmul_before_or_after_them_is_not_beside_it():
    for lines in ([f"%dot = {DOT}", START, DONE], [START, DONE, f"%dot = {DOT}"]):
        row = the_one(*lines)
        assert (row.beside, row.matmuls, row.flops, row.hidden) == ("nothing", (), 0, False)


def test_matmuls_are_numbered_in_the_order_of_their_computation():
    row = the_one(f"%d0 = {DOT}", START, f"%d1 = {DOT}", f"%d2 = {DOT}", DONE, f"%d3 = {DOT}")
    assert row.matmuls == (1, 2) and row.flops == 2 * MATMUL


def test_other_work_is_counted_by_what_it_writes():
    row = the_one(START, f"%s = {SUM}", DONE)
    assert (row.beside, row.flops, row.other_bytes, row.hidden) == ("other work", 0, 256, False)


def test_lines_that_compute_nothing_are_nothing():
    """Names, constants, copies by another engine, and other collectives."""
    rows = ms.overlap(
        program(
            START,
            "%t = (f32[64], bf16[64,128]) tuple(%v, %w)",
            "%one = f32[64] get-tuple-element(%t), index=0",
            "%cast = f32[8,8] bitcast(%v)",
            "%zero = f32[] constant(0)",
            "%moving = (f32[64], f32[64], u32[]) copy-start(%v)",
            "%moved = f32[64] copy-done(%moving)",
            "%other = bf16[512,128] all-gather(%w), replica_groups={}, dimensions={0}",
            DONE,
        ),
        LINE,
    )
    assert [row.beside for row in rows] == ["nothing", "synchronous"]
    assert [row.other_bytes for row in rows] == [0, 0]


FUSED = """%gemm (p: bf16[32,64], q: bf16[64,128]) -> bf16[32,128] {
  %p = bf16[32,64] parameter(0)
  %q = bf16[64,128] parameter(1)
  ROOT %d = bf16[32,128] dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%sum (r: f32[64]) -> f32[64] {
  %r = f32[64] parameter(0)
  ROOT %e = f32[64] add(%r, %r)
}

%put (stack: f32[4,64], part: f32[1,64], i: s32[]) -> f32[4,64] {
  %stack = f32[4,64] parameter(0)
  %part = f32[1,64] parameter(1)
  %i = s32[] parameter(2)
  ROOT %u = f32[4,64] dynamic-update-slice(%stack, %part, %i, %i)
}

"""


def test_a_fusion_counts_with_what_it_holds():
    row = the_one(
        START,
        "%f = bf16[32,128] fusion(%x, %w), kind=kCustom, calls=%gemm",
        "%g = f32[64] fusion(%v), kind=kLoop, calls=%sum",
        DONE,
        computations=FUSED,
    )
    assert (row.beside, row.matmuls, row.flops) == ("matmul", (0,), MATMUL)
    assert row.other_bytes == 64 * 4, "the fusion without a matmul"


def test_an_update_in_place_writes_its_part_and_not_the_stack():
    row = the_one(
        "%s = f32[4,64] broadcast(%v), dimensions={1}",
        "%i = s32[] constant(0)",
        "%one = f32[1,64] bitcast(%v)",
        START,
        "%f = f32[4,64] fusion(%s, %one, %i), kind=kLoop, calls=%put",
        DONE,
        computations=FUSED,
    )
    assert (row.beside, row.other_bytes) == ("other work", 64 * 4)


CONTRACTS = '"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]'


@pytest.mark.parametrize(
    "config, flops",
    [
        (f', backend_config={{"gemm_backend_config":{{{CONTRACTS}}}}}', MATMUL),
        (
            f', backend_config="{{{CONTRACTS}}}"'.replace('"', '\\"').replace('=\\"', '="')[:-2]
            + '"',
            MATMUL,
        ),
        ("", None),
    ],
)
@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"])
def test_a_matmul_of_a_library(target, config, flops):
    """Its operations follow from its configuration; without one they are not known."""
    call = f'custom-call(%x, %w), custom_call_target="{target}"{config}'
    row = the_one(START, f"%c = (bf16[32,128], s8[4096]) {call}", DONE)
    assert (row.beside, row.flops, row.hidden) == ("matmul", flops, True)


def test_a_kernel_may_be_anything():
    """A hand-written kernel or attention of a library: whether it hides anything is not known."""
    call = 'custom-call(%x, %w), custom_call_target="tpu_custom_call"'
    row = the_one(START, f"%c = bf16[32,128] {call}", DONE)
    assert (row.beside, row.hidden, row.matmuls) == ("kernel", None, ())
    row = the_one(START, f"%c = bf16[32,128] {call}", f"%dot = {DOT}", DONE)
    assert (row.beside, row.hidden, row.flops) == ("matmul", True, MATMUL)


def test_marks_of_the_compiler_are_no_kernels():
    call = 'custom-call(%v), custom_call_target="Sharding"'
    assert the_one(START, f"%c = f32[64] {call}", DONE).beside == "nothing"


def test_a_ragged_product_is_a_matmul_of_unknown_size():
    line = "%c = bf16[32,128] ragged-dot(%x, %w, %v), lhs_contracting_dims={1}"
    row = the_one(START, line, DONE)
    assert (row.beside, row.flops, row.hidden) == ("matmul", None, True)


# How a pair is written


@pytest.mark.parametrize(
    "start, done, axes",
    [
        (START, DONE, ("data",)),
        ("%start = f32[64] all-reduce-start(%v), replica_groups={}, to_apply=%add",
         "%done = f32[64] all-reduce-done(%start)", ("data",)),
        ("%start = (f32[64], f32[64]) collective-permute-start(%v), source_target_pairs={{0,1},{1,0}}",
         "%done = f32[64] collective-permute-done(%start)", ("data",)),
        ("%start = ((f32[64]), f32[64]) all-to-all-start(%v), replica_groups={}, dimensions={0}",
         "%done = f32[64] all-to-all-done(%start)", ("data",)),
        ("%start = (f32[64], u32[], token[]) send(%v, %v), channel_id=1, "
         'frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1}}"}',
         "%done = token[] send-done(%start)", ("?",)),
    ],
    ids=["gather", "sum", "permute", "all-to-all", "send"],
)  # fmt: skip
def test_pairs_of_every_kind(start, done, axes):
    row = the_one(start, f"%dot = {DOT}", done, f"%dot.2 = {DOT}")
    assert (row.beside, row.matmuls, row.flops) == ("matmul", (0,), MATMUL)


def test_a_collective_with_one_line_is_synchronous():
    line = "%g = bf16[512,128] all-gather(%w), replica_groups={}, dimensions={0}"
    row = the_one(f"%dot = {DOT}", line, f"%dot.2 = {DOT}")
    assert (row.beside, row.matmuls, row.hidden) == ("synchronous", (), False)


def test_a_pair_that_xla_marked_as_synchronous_is():
    """XLA for GPU keeps the two lines of a collective that it could not start early."""
    marked = '{"collective_backend_config":{"is_sync":%s}}'
    for said, beside in (("true", "synchronous"), ("false", "matmul")):
        start = f"{START}, backend_config={marked % said}"
        assert the_one(start, f"%dot = {DOT}", DONE).beside == beside


def test_what_a_start_returns_may_pass_through_other_lines():
    row = the_one(
        START,
        "%t = ((bf16[64,128], bf16[512,128]), f32[64]) tuple(%start, %v)",
        "%again = (bf16[64,128], bf16[512,128]) get-tuple-element(%t), index=0",
        f"%dot = {DOT}",
        "%done = bf16[512,128] all-gather-done(%again)",
    )
    assert row.beside == "matmul"


def test_an_end_that_is_not_there_is_unknown():
    row = the_one(START, f"%dot = {DOT}")
    assert (row.beside, row.matmuls, row.flops, row.hidden) == ("unknown", (), None, None)
    other = "%done = bf16[512,128] all-gather-done(%else)"
    assert the_one(START, f"%dot = {DOT}", other).beside == "unknown"


WRAPPED = """%wrapped (p: bf16[64,128]) -> bf16[512,128] {
  %p = bf16[64,128] parameter(0)
  ROOT %g = bf16[512,128] all-gather(%p), replica_groups={}, dimensions={0}
}

"""


@pytest.mark.parametrize("opcode", ["async", "call", "fusion"])
def test_a_start_around_a_computation(opcode):
    """XLA's general notation, https://openxla.org/xla/async_ops."""
    row = the_one(
        f"%start = ((bf16[64,128]), bf16[512,128], s32[]) {opcode}-start(%w), calls=%wrapped",
        f"%dot = {DOT}",
        f"%middle = ((bf16[64,128]), bf16[512,128], s32[]) {opcode}-update(%start)",
        f"%dot.2 = {DOT}",
        f"%done = bf16[512,128] {opcode}-done(%middle)",
        computations=WRAPPED,
    )
    assert (row.beside, row.matmuls, row.flops) == ("matmul", (0, 1), 2 * MATMUL)


@pytest.mark.parametrize("opcode", ["call", "fusion"])
def test_a_collective_inside_what_is_called_has_no_end_of_its_own(opcode):
    attribute = "to_apply" if opcode == "call" else "calls"
    line = f"%g = bf16[512,128] {opcode}(%w), {attribute}=%wrapped"
    assert the_one(line, f"%dot = {DOT}", computations=WRAPPED).beside == "synchronous"


# Loops


def looped(*lines, trips=5, known=True):
    """A loop of these lines: the state is (counter, w, x, v)."""
    state = "(s32[], bf16[64,128], bf16[32,64], f32[64])"
    body = "".join(f"  {line}\n" for line in lines)
    config = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' if known else ""
    computations = (
        f"%cond (c: {state}) -> pred[] {{\n  %c = {state} parameter(0)\n"
        "  ROOT %go = pred[] constant(true)\n}\n\n"
        f"%body (s: {state}) -> {state} {{\n  %s = {state} parameter(0)\n"
        "  %w = bf16[64,128] get-tuple-element(%s), index=1\n"
        "  %x = bf16[32,64] get-tuple-element(%s), index=2\n"
        "  %v = f32[64] get-tuple-element(%s), index=3\n"
        f"{body}  %i = s32[] get-tuple-element(%s), index=0\n"
        f"  ROOT %t = {state} tuple(%i, %w, %x, %v)\n}}\n\n"
    )
    lines = (
        "%zero = s32[] constant(0)",
        f"%init = {state} tuple(%zero, %w, %x, %v)",
        f"%loop.7 = {state} while(%init), condition=%cond, body=%body{config}",
    )
    return computations, lines


def test_a_collective_in_a_loop_says_which_and_how_often_it_turns():
    computations, lines = looped(START, f"%dot = {DOT}", DONE)
    row = the_one(*lines, computations=computations)
    assert (row.loop, row.trips, row.executions) == ("loop.7", 5, 5)
    assert row.flops == MATMUL, "of one turn"
    computations, lines = looped(START, f"%dot = {DOT}", DONE, known=False)
    row = the_one(*lines, computations=computations)
    assert (row.loop, row.trips, row.executions) == ("loop.7", None, None)
    assert the_one(START, DONE).loop is None


def test_a_loop_beside_a_collective_is_as_much_as_all_of_its_turns():
    computations, lines = looped(f"%dot = {DOT}", f"%s2 = {SUM}")
    row = the_one(START, *lines, DONE, computations=computations)
    assert (row.beside, row.flops, row.other_bytes) == ("matmul", 5 * MATMUL, 5 * 256)
    computations, lines = looped(f"%dot = {DOT}", known=False)
    row = the_one(START, *lines, DONE, computations=computations)
    assert (row.beside, row.flops, row.hidden) == ("matmul", None, True)


BRANCHES = """%yes (p: (bf16[32,64], bf16[64,128])) -> bf16[32,128] {
  %p = (bf16[32,64], bf16[64,128]) parameter(0)
  %a1 = bf16[32,64] get-tuple-element(%p), index=0
  %b1 = bf16[64,128] get-tuple-element(%p), index=1
  ROOT %d = bf16[32,128] dot(%a1, %b1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%no (q: (bf16[32,64], bf16[64,128])) -> bf16[32,128] {
  %q = (bf16[32,64], bf16[64,128]) parameter(0)
  %z = bf16[] constant(0)
  ROOT %r = bf16[32,128] broadcast(%z), dimensions={}
}

"""


@pytest.mark.parametrize("other, flops", [("%yes", MATMUL), ("%no", None)])
def test_branches_that_differ_are_not_known(other, flops):
    row = the_one(
        "%which = pred[] constant(true)",
        "%both = (bf16[32,64], bf16[64,128]) tuple(%x, %w)",
        START,
        "%b = bf16[32,128] conditional(%which, %both, %both), true_computation=%yes, "
        f"false_computation={other}",
        DONE,
        computations=BRANCHES,
    )
    assert (row.beside, row.flops) == ("matmul", flops)


# FLOPs


def test_a_product_has_the_flops_that_xla_counts():
    """A batched one, compiled for CPU, by XLA's own cost analysis."""
    x, y = jnp.zeros((6, 40, 50)), jnp.zeros((6, 50, 70))
    compiled = jax.jit(jnp.matmul).lower(x, y).compile()
    program = hlo.parse(compiled.as_text())
    counted = _work.inside(program, program.entry)
    assert (counted.matmuls, counted.flops) == (1, compiled.cost_analysis()["flops"])
    assert counted.flops == 2 * 6 * 40 * 50 * 70


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": "SAME"},
        {"window_strides": (2, 3)},
        {"padding": ((2, 1), (0, 3)), "rhs_dilation": (2, 1)},
        {"padding": ((3, 3), (3, 3)), "lhs_dilation": (2, 2)},
        {"feature_group_count": 4},
        {"batch_group_count": 2},
    ],
    ids=str,
)
def test_a_convolution_has_the_flops_that_xla_counts(options):
    """Padding, strides, dilations and groups: as XLA's own cost analysis has it."""
    options = {"window_strides": (1, 1), "padding": "VALID"} | options
    groups = options.get("feature_group_count", 1)
    x, w = jnp.zeros((4, 8, 13, 17)), jnp.zeros((16, 8 // groups, 3, 5))
    convolve = jax.jit(lambda x, w: jax.lax.conv_general_dilated(x, w, **options))
    compiled = convolve.lower(x, w).compile()
    program = hlo.parse(compiled.as_text())
    counted = _work.inside(program, program.entry)
    assert (counted.matmuls, counted.flops) == (1, compiled.cost_analysis()["flops"])


@pytest.mark.parametrize(
    "types, rest, flops",
    [
        # 1 + 1 + 2 + 2 outputs reach into the padding, each of the other six has three numbers.
        ("f32[1,1,10] f32[1,1,10] f32[1,1,3]", "window={size=3 pad=4_0 rhs_dilate=2}", 2 * 24),
        # Each half of the batch has kernels of its own.
        ("f32[2,16,8] f32[4,8,10] f32[16,8,3]", "window={size=3}, batch_group_count=2", 2 * 8 * 16 * 2 * 24),
    ],
    ids=["dilated kernel", "groups of the batch"],
)  # fmt: skip
def test_a_convolution_worked_out_by_hand(types, rest, flops):
    """Those that XLA for CPU writes otherwise before it counts them."""
    result, x, w = types.split()
    row = the_one(
        f"%image = {x} broadcast(%v), dimensions={{}}",
        f"%kernel = {w} broadcast(%v), dimensions={{}}",
        START,
        f"%c = {result} convolution(%image, %kernel), dim_labels=bf0_oi0->bf0, {rest}",
        DONE,
    )
    assert row.flops == flops


def test_a_matmul_written_as_a_convolution():
    """So does XLA for TPU: features are contracted, and no window is there."""
    line = "%c = bf16[32,128] convolution(%x, %w), dim_labels=bf_io->bf"
    assert the_one(START, line, DONE).flops == MATMUL


# What three compilers make


def kept(name):
    return gzip.decompress((FIXTURES / f"{name}.hlo.gz").read_bytes()).decode()


def beside(name, mesh):
    return [
        (row.kind, row.loop is not None, row.beside, row.matmuls)
        for row in ms.overlap(kept(name), mesh)
    ]


def test_six_gathers_for_gpu():
    """Three of them are combined into one that begins before the first matmul (make_known.py)."""
    first, second = ms.overlap(kept("known/gpu/hidden_gathers"), LINE)
    assert first.payload_bytes == second.payload_bytes == 3 * 2048 * 2048 * 2
    assert (first.beside, first.flops) == ("other work", 0)
    assert (second.beside, second.matmuls, second.flops) == ("matmul", (2,), 2 * 512 * 2048 * 2048)


def test_six_gathers_for_tpu():
    """Four wait; two begin in a fusion, go on in those of two and three matmuls, and end in one more."""
    rows = ms.overlap(kept("known/tpu/hidden_gathers"), LINE)
    assert [row.beside for row in rows] == ["synchronous"] * 4 + ["matmul"] * 2
    assert [row.matmuls for row in rows[4:]] == [(0, 1), (2, 3, 4)]
    assert [row.flops for row in rows[4:]] == [n * 2 * 512 * 2048 * 2048 for n in (2, 3)]
    assert rows.by("kind", "hidden") == {
        ("all-gather", False): (4, 4 * 2048 * 2048 * 2, 4 * 2048 * 2048 * 2 * 7 / 8),
        ("all-gather", True): (2, 2 * 2048 * 2048 * 2, 2 * 2048 * 2048 * 2 * 7 / 8),
    }


@pytest.mark.parametrize("backend, said", [("gpu", "other work"), ("tpu", "synchronous")])
def test_a_gather_in_a_loop_has_no_matmul_of_its_own_turn_beside_it(backend, said):
    (row,) = ms.overlap(kept(f"known/{backend}/hidden_in_a_loop"), LINE)
    assert (row.beside, row.hidden, row.trips) == (said, False, 6)


def test_an_exchange_and_a_shift_for_tpu_beside_a_product():
    """make.py gives the all-to-all a product of two 2,048 x 2,048 matrices to hide behind."""
    rows = {row.kind: row for row in ms.overlap(kept("tpu-kinds"), GRID)}
    for kind in ("all-to-all", "collective-permute"):
        assert (rows[kind].beside, rows[kind].flops) == ("matmul", 2 * 2048**3)
    for kind in ("all-gather", "reduce-scatter"):
        assert (rows[kind].beside, rows[kind].trips) == ("synchronous", 5)


def test_fully_sharded_steps_for_tpu():
    """The second weight of a block is gathered beside the matmul of the first, forward."""
    assert beside("tpu-fsdp", LINE) == [
        ("all-gather", True, "synchronous", ()),
        ("all-gather", True, "matmul", (0,)),
        ("reduce-scatter", True, "synchronous", ()),
        ("reduce-scatter", True, "synchronous", ()),
    ]
    hidden = ms.overlap(kept("tpu-auto"), GRID).by("kind", "axes", "hidden")
    assert hidden.bytes("all-gather", "data", True) == 8 * 1024 * 1024 * 2
    assert hidden.bytes("all-gather", "model", True) == 4 * 256 * 1024 * 2


@pytest.mark.parametrize("backend", ["tpu", "gpu"])
def test_every_collective_that_moves_is_there_once(backend):
    """In all kept programs: the same bytes by kind and axes as collectives lists."""
    for path in sorted((FIXTURES / "known" / backend).iterdir()):
        text = gzip.decompress(path.read_bytes()).decode()
        mesh = LINE if "'data'=8" in text else GRID
        if path.name.startswith("of_three"):
            mesh = AbstractMesh((2, 2, 2), ("a", "b", "c"))
        ours, theirs = (f(text, mesh).by("kind", "axes") for f in (ms.overlap, ms.collectives))
        assert {key: total[1:] for key, total in ours.items()} == {
            key: total[1:] for key, total in theirs.items()
        }, path.name


def test_a_program_compiled_for_cpu_has_no_pairs_and_says_so():
    mesh = jax.make_mesh((8,), ("data",))
    x = jax.ShapeDtypeStruct((8, 16), "float32", sharding=jax.NamedSharding(mesh, P("data")))
    rows = ms.overlap(jax.jit(lambda x: x.sum(0)).lower(x).compile())
    assert [row.beside for row in rows] == ["synchronous"]
    note = "XLA for CPU starts no collective early: compile for the device that you use"
    assert note in repr(rows) and note in rows._repr_html_()
    assert note not in repr(ms.overlap(program(START, DONE), LINE))


# What it shows, and refuses


def test_the_table_says_how_many_are_beside_a_matmul():
    text = program(START, f"%dot = {DOT}", DONE, f"%start.2 = {GATHER}", "%d = bf16[512,128] all-gather-done(%start.2)",
                   f"%start.3 = {GATHER}")  # fmt: skip
    rows = ms.overlap(text, LINE)
    shown = repr(rows)
    assert shown.startswith(
        "Beside a matmul: 1 of 3 collectives; unknown: 1. A program given as text"
    )
    head, *lines = [line.split() for line in shown.splitlines()[1:]]
    assert [line[line.index("131,072") + 1 :] for line in lines] == [
        ["-", "-", "matmul", "0", f"{MATMUL:,}", "0", "-"],
        ["-", "-", "nothing", "-", "0", "0", "-"],
        ["-", "-", "unknown", "-", "-", "-", "-"],
    ]
    assert repr(rows[:1]).startswith("Beside a matmul: 1 of 1 collectives")
    assert {key[1] for key in rows.by("kind", "hidden")} == {True, False, None}
    assert [line.split()[1] for line in repr(rows.by("kind", "hidden")).splitlines()[2:]] == [
        "yes",
        "no",
        "unknown",
    ]


def test_a_program_without_collectives():
    assert repr(ms.overlap(program(f"%dot = {DOT}"), LINE)).startswith("No collectives. ")


def test_keys_that_do_not_exist_are_errors():
    table = ms.overlap(program(START, f"%dot = {DOT}", DONE), LINE).by("kind", "beside")
    assert table.bytes("all-gather", "matmul") == 512 * 128 * 2
    assert table.bytes("all-gather", "nothing") == 0
    with pytest.raises(ValueError, match="no beside 'matmuls', there are matmul, kernel"):
        table.bytes("all-gather", "matmuls")
    with pytest.raises(ValueError, match="no field 'besides', there are kind"):
        ms.overlap(program(START, DONE), LINE).by("besides")
    with pytest.raises(ValueError, match="no field 'beside'"):
        ms.collectives(program(START, DONE), LINE).by("beside")


def test_it_says_what_to_pass():
    with pytest.raises(ValueError, match=r"pass the one to use, overlap\(compiled, mesh\)"):
        ms.overlap(program(START, DONE))
    with pytest.raises(TypeError, match="call .lower"):
        ms.overlap(jax.jit(jnp.sin))
    with pytest.raises(ValueError, match="not compiled to the end"):
        ms.overlap(program(START, DONE).replace("is_scheduled=true, ", ""), LINE)
