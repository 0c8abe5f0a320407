"""What a compiled program's text may look like: spellings, async pairs, other backends."""

import gzip
import itertools
import math
import pathlib
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType

import meshscope as ms
from meshscope import _hlo as hlo

pytestmark = pytest.mark.filterwarnings("error::meshscope.UnparsedCollectiveWarning")
P = jax.P
GRID = AbstractMesh((2, 4), ("data", "model"))
LINE = AbstractMesh((8,), ("data",))
FIXTURES = pathlib.Path(__file__).parent / "fixtures"


def fixture(name):
    return gzip.decompress((FIXTURES / f"tpu-{name}.hlo.gz").read_bytes()).decode()


def as_sets(groups):
    return {frozenset(group) for group in groups}


def accepted(text):
    """The text as XLA's own reader prints it, so that only what it accepts is tested."""
    try:
        from jaxlib import _hlo
    except ImportError:  # a part of jaxlib that may move
        return text
    return _hlo.hlo_module_from_text(text).to_string()


def module(lines, computations="", devices=8):
    """A program around some instructions, in XLA's own words."""
    body = "\n".join(f"  {line}" for line in lines)
    return accepted(
        f"HloModule m, is_scheduled=true, num_partitions={devices}\n\n"
        "%add (a: f32[], b: f32[]) -> f32[] {\n"
        "  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n"
        "  ROOT %c = f32[] add(%a, %b)\n}\n\n"
        f"{computations}\n"
        "ENTRY %main (p: f32[8,4]) -> f32[8,4] {\n"
        f"  %p = f32[8,4]{{1,0}} parameter(0)\n{body}\n"
        "  ROOT %last = f32[8,4]{1,0} copy(%p)\n}\n"
    )


# Spellings of replica groups


@pytest.mark.parametrize(
    ("spelled", "groups"),
    [
        ("{{0,1},{2,3}}", [{0, 1}, {2, 3}]),
        ("{{0,2,4,6}}", [{0, 2, 4, 6}]),
        ("{}", [set(range(8))]),
        ("[2,4]<=[8]", [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        ("[4,2]<=[2,4]T(1,0)", [{0, 4}, {1, 5}, {2, 6}, {3, 7}]),
        ("[4,2]<=[2,2,2]T(2,0,1)", [{0, 2}, {4, 6}, {1, 3}, {5, 7}]),
        ("mesh['a'=2,'b'=4] {'b'}", [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", [{0, 4}, {1, 5}, {2, 6}, {3, 7}]),
        ("mesh['a'=2,'b'=2,'c'=2] {'c','a'}", [{0, 1, 4, 5}, {2, 3, 6, 7}]),
        ("mesh['a'=2,'one'=1,'b'=4] {'a','one'}", [{0, 4}, {1, 5}, {2, 6}, {3, 7}]),
        # A part of an axis: 8 as 2 x 4, its minor 4 and its major 2.
        ("mesh['a'=8] {'a':(2)4}", [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        ("mesh['a'=8] {'a':(1)2}", [{0, 4}, {1, 5}, {2, 6}, {3, 7}]),
        ("mesh['a'=8] {'a':(2)2}", [{0, 2}, {1, 3}, {4, 6}, {5, 7}]),
        ("mesh['a'=2,'b'=4] {'a','b':(1)2}", [{0, 2, 4, 6}, {1, 3, 5, 7}]),
        # Devices in another order: rows (0, 2, 4, 6) and (1, 3, 5, 7), or as listed.
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", [{0, 1}, {2, 3}, {4, 5}, {6, 7}]),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", [{0, 2}, {1, 3}]),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'a'}", [{0, 1}, {2, 3}]),
    ],
)
def test_groups_in_every_spelling(spelled, groups):
    devices = 4 if "'b'=2], " in spelled else 8
    line = (
        f"%r = f32[8,4] all-reduce(%p), channel_id=1, replica_groups={spelled}, "
        "use_global_device_ids=true, to_apply=%add"
    )
    printed = next(s for s in module([line], devices=devices).split("\n") if "all-reduce" in s)
    assert as_sets(hlo.groups(printed, devices)) == {frozenset(g) for g in groups}


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_three_spellings_of_one_grouping_agree(data):
    """Groups that a loop over coordinates collects, one by one."""
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4), "sizes")
    names = [f"axis_{i}" for i in range(len(sizes))]
    used = data.draw(st.sets(st.sampled_from(names), min_size=1), "axes")
    collected = {}
    for position, where in enumerate(itertools.product(*map(range, sizes))):
        rest = tuple(i for i, name in zip(where, names) if name not in used)
        collected.setdefault(rest, []).append(position)
    groups = list(collected.values())

    mesh = ",".join(f"'{name}'={size}" for name, size in zip(names, sizes))
    axes = ",".join(f"'{name}'" for name in data.draw(st.permutations(sorted(used))))
    order = [i for i, n in enumerate(names) if n not in used]
    order += [i for i, n in enumerate(names) if n in used]
    listed = "{" + ",".join("{" + ",".join(map(str, g)) + "}" for g in groups) + "}"
    iota = f"[{len(groups)},{len(groups[0])}]<={sizes}T({','.join(map(str, order))})"
    total = math.prod(sizes)
    for spelled in (listed, iota.replace(" ", ""), f"mesh[{mesh}] {{{axes}}}"):
        got = hlo.groups(f", channel_id=1, replica_groups={spelled}, x=1", total)
        assert as_sets(got) == as_sets(groups)


# Pairs of a start and an end, and collectives inside what is called


def test_a_start_and_its_end_count_once():
    """In XLA's notation for work that runs beside other work."""
    groups = "replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true"
    text = module(
        [
            f"%r0 = f32[8,4] all-reduce-start(%p), channel_id=1, {groups}, to_apply=%add",
            "%r1 = f32[8,4] all-reduce-done(%r0)",
            f"%g0 = (f32[8,4], f32[32,4]) all-gather-start(%r1), channel_id=2, {groups}, "
            "dimensions={0}",
            "%g1 = f32[32,4] all-gather-done(%g0)",
            "%c0 = (f32[8,4], f32[8,4]) collective-permute-start(%p), channel_id=3, "
            "source_target_pairs={{0,1},{4,5}}",
            "%c1 = f32[8,4] collective-permute-done(%c0)",
            f"%z0 = ((f32[32,4]), f32[8,4], s32[]) reduce-scatter-start(%g1), channel_id=4, "
            f"{groups}, dimensions={{0}}, to_apply=%add",
            "%z1 = ((f32[32,4]), f32[8,4], s32[]) reduce-scatter-update(%z0)",
            "%z2 = f32[8,4] reduce-scatter-done(%z1)",
        ]
    )
    rows = ms.collectives(text, GRID)
    assert rows.by("kind", "axes") == {
        ("all-reduce", ("model",)): (1, 128, 192),
        ("all-gather", ("model",)): (1, 512, 384),
        ("collective-permute", ("model",)): (1, 128, 128),
        ("reduce-scatter", ("model",)): (1, 512, 384),
    }
    assert {row.kind: row.shape for row in rows}["all-gather"] == (32, 4)


def test_a_wrapped_start_calls_its_computation_once():
    """The long form, where start, update and end all name the computation."""
    wrapped = (
        "%wrapped (q: f32[8,4]) -> f32[8,4] {\n  %q = f32[8,4] parameter(0)\n"
        "  ROOT %x = f32[8,4] all-to-all(%q), channel_id=5, dimensions={0}, "
        "replica_groups=[4,2]<=[2,4]T(1,0)\n}\n"
    )
    state = "((f32[8,4]), f32[8,4], u32[])"
    text = module([], wrapped).replace(
        "  ROOT %last",
        f"  %a = {state} async-start(%p), calls=%wrapped\n"
        f"  %b = {state} async-update(%a), calls=%wrapped\n"
        "  %d = f32[8,4] async-done(%b), calls=%wrapped\n  ROOT %last",
    )
    text = text if "%wrapped" in text else text.replace("ENTRY", wrapped + "\nENTRY")
    assert ms.collectives(text, GRID).by("kind", "axes") == {
        ("all-to-all", ("data",)): (1, 128, 64)
    }


def test_calls_fusions_and_branches_are_followed():
    body = "%q{0} = f32[8,4] parameter(0)\n  ROOT %r{0} = f32[8,4] all-reduce(%q{0}), "
    body += "channel_id={0}, replica_groups={{{{0,4}},{{1,5}},{{2,6}},{{3,7}}}}, "
    body += "use_global_device_ids=true, to_apply=%add\n}}\n"
    inner = "".join(
        f"%{name} (q{i}: f32[8,4]) -> f32[8,4] {{\n  {body.format(i)}\n"
        for i, name in enumerate(["called", "fused", "yes", "no", "only"], start=1)
    )
    text = module(
        [
            "%c = f32[8,4] call(%p), to_apply=%called",
            "%c2 = f32[8,4] call(%c), to_apply=%called",
            "%f = f32[8,4] fusion(%c2), kind=kCustom, calls=%fused",
            "%w = pred[] constant(true)",
            "%b = f32[8,4] conditional(%w, %f, %f), true_computation=%yes, false_computation=%no",
            "%i = s32[] constant(0)",
            "%o = f32[8,4] conditional(%i, %b), branch_computations={%only}",
        ],
        inner,
    )
    rows = ms.collectives(text, GRID)
    assert {row.axes for row in rows} == {("data",)}
    # Called twice, fused once, one branch or the other alike, the only branch of one.
    assert [row.executions for row in rows] == [1, 1, 1, 1, 1]


def test_rarer_kinds_are_recognised():
    text = module(
        [
            "%b = f32[8,4] collective-broadcast(%p), channel_id=1, replica_groups={{0,1},{2,3}}",
            "%t = token[] after-all()",
            "%s = (f32[8,4], u32[], token[]) send(%p, %t), channel_id=2, "
            'frontend_attributes={_xla_send_recv_source_target_pairs="{{0,4},{1,5}}"}',
            "%sd = token[] send-done(%s), channel_id=2",
            "%r = (f32[8,4], u32[], token[]) recv(%t), channel_id=2, "
            'frontend_attributes={_xla_send_recv_source_target_pairs="{{0,4},{1,5}}"}',
            "%rd = (f32[8,4], token[]) recv-done(%r), channel_id=2",
            "%h = (f32[8,4], u32[], token[]) send(%p, %t), channel_id=3, is_host_transfer=true",
            "%hd = token[] send-done(%h), channel_id=3, is_host_transfer=true",
            "%o = s64[8] constant({0,0,0,0,0,0,0,0})",
            "%g = f32[8,4] ragged-all-to-all(%p, %p, %o, %o, %o, %o), channel_id=4, "
            "replica_groups={{0,1,2,3,4,5,6,7}}",
        ]
    )
    rows = {row.kind: row for row in ms.collectives(text, GRID)}
    assert {kind: (row.axes, row.payload_bytes, row.wire_bytes) for kind, row in rows.items()} == {
        "collective-broadcast": (("?",), 128, 128),
        "send": (("data",), 128, 128),
        "recv": (("data",), 128, 0),
        "ragged-all-to-all": (("data", "model"), 128, None),
    }
    assert ms.collectives(text, GRID).by("kind")["ragged-all-to-all"].wire_bytes is None


@pytest.mark.parametrize(
    ("element", "name", "bytes_of_32"),
    [
        ("bf16", "bfloat16", 64),
        ("f16", "float16", 64),
        ("f64", "float64", 256),
        ("s8", "int8", 32),
        ("u32", "uint32", 128),
        ("pred", "bool", 32),
        ("c64", "complex64", 256),
        ("f8e4m3fn", "float8_e4m3fn", 32),
        ("s4", "int4", 16),
    ],
)
def test_bytes_and_names_of_element_types(element, name, bytes_of_32):
    line = (
        f"%x = {element}[8,4] all-to-all(%q), channel_id=1, replica_groups={{}}, dimensions={{0}}"
    )
    text = module([f"%q = {element}[8,4] convert(%p)", line])
    (row,) = ms.collectives(text, LINE)
    assert (row.dtype, row.payload_bytes, row.shape) == (name, bytes_of_32, (8, 4))
    assert jnp.dtype(row.dtype).name == name


# What cannot be read is never passed over in silence


GOOD = (
    "%r = f32[8,4]{1,0} all-reduce(%p), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, "
    "use_global_device_ids=true, to_apply=%add"
)


@pytest.mark.parametrize(
    "broken",
    [
        GOOD.replace("all-reduce(", "all-reduce-sideways("),
        GOOD.replace("all-reduce(", "collective-of-tomorrow("),
        GOOD.replace("{{0,1,2,3},{4,5,6,7}}", "<<0,1,2,3>>"),
        GOOD.replace("all-reduce(%p)", "all-reduce(%nobody)"),
        GOOD.replace("(%p)", "(%p"),
        GOOD.replace("%r = f32[8,4]{1,0} all-reduce(%p)", "all-reduce(%p) -> %r"),
        GOOD.replace("all-reduce(%p)", "all-reduce()"),
        GOOD.replace("all-reduce(%p)", "all-gather(%p), dimensions={0}"),
    ],
)
def test_a_line_that_cannot_be_read_warns_and_the_rest_counts(broken):
    good = module([GOOD])
    line = next(s for s in good.split("\n") if " all-reduce(" in s)
    text = good.replace(line, line.replace("%r", "%first") + "\n  " + broken)
    with pytest.raises(ms.UnparsedCollectiveWarning, match="cannot read"):
        ms.collectives(text, GRID)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = ms.collectives(text, GRID)
    assert [w.category for w in caught] == [ms.UnparsedCollectiveWarning]
    assert rows.by("kind", "axes") == {("all-reduce", ("model",)): (1, 128, 192)}


def test_a_collective_that_nothing_calls_warns():
    """As when a new way of calling a computation is not known here."""
    text = module([GOOD]).replace("ENTRY ", "") + (
        "ENTRY %start (p: f32[8,4]) -> f32[8,4] {\n  %p = f32[8,4]{1,0} parameter(0)\n"
        "  ROOT %y = f32[8,4]{1,0} call-of-tomorrow(%p), how=%main\n}\n"
    )
    with pytest.raises(ms.UnparsedCollectiveWarning):
        ms.collectives(text, GRID)


def test_names_and_strings_are_not_mistaken_for_collectives():
    text = module([]).replace(
        "copy(%p)", 'copy(%p), metadata={op_name="jit(f)/all-reduce(x)" stack_frame_id=3}'
    )
    assert len(ms.collectives(text, GRID)) == 0


def test_groups_that_leave_devices_out_are_not_an_axis():
    """Half of the devices exchange along model; the other half does not."""
    line = "%b = f32[8,4] collective-broadcast(%p), channel_id=1, replica_groups={{0,1,2,3}}"
    (row,) = ms.collectives(module([line]), GRID)
    assert (row.axes, row.within, row.groups) == (("?",), ("model",), ((0, 1, 2, 3),))


def test_positions_beyond_the_mesh_are_an_error():
    text = module([GOOD]).replace(", num_partitions=8", "")
    with pytest.raises(ValueError, match="none at"):
        ms.collectives(text, AbstractMesh((4,), ("x",)))


# Programs compiled for a TPU (fixtures/README.md); programs in tools/make_hlo_fixtures.py


def test_tpu_every_kind():
    """Hand-counted, in float32. x is 64/4 x 128 values here = 8192 bytes; gathered over
    model, 32768, and scattered again, 5 times each; moved and summed once, over 8 devices
    2 x 7/8; v is 4 x 256 x 128 values = 524288 bytes, of which a quarter stays."""
    rows = ms.collectives(fixture("kinds"), GRID)
    assert rows.by("kind", "axes") == {
        ("all-gather", ("model",)): (5, 163840, 122880),
        ("reduce-scatter", ("model",)): (5, 163840, 122880),
        ("collective-permute", ("model",)): (1, 8192, 8192),
        ("all-reduce", ("data", "model")): (1, 8192, 14336),
        ("all-to-all", ("model",)): (1, 524288, 393216),
    }
    assert "all-to-all-start(" in fixture("kinds")
    inside = {row.kind for row in rows if row.inside_loop}
    assert inside == {"all-gather", "reduce-scatter"}
    assert {row.source_line.split(":")[0] for row in rows} == {"make_hlo_fixtures.py"}


def test_tpu_fully_sharded_step():
    """Hand-counted, in bfloat16. The two weights of 4 blocks are 4 x 2 x 1024 x 4096 values
    of 2 bytes = 67108864. Gathered once (they are kept for the way back), their gradients
    scattered once: 8 of each, 7/8 of the bytes on the wire. No loss is asked for.

    The compiler carries one of the two gathers through a start, a step and an end."""
    text = fixture("fsdp")
    assert text.count(" all-gather(") == 4 and "AsyncCollectiveDone" in text
    assert ms.collectives(text, LINE).by("kind", "axes") == {
        ("all-gather", ("data",)): (8, 67108864, 58720256),
        ("reduce-scatter", ("data",)): (8, 67108864, 58720256),
    }


def test_tpu_step_without_written_collectives():
    """The compiler's choice, counted from its text: 14 all-gathers, of which 7 carry on what
    another fusion started; 3 all-reduces, one of two values, each fused with a slice.

    forward, 4 times: gather h over model; w and v over data; scatter the sum over model.
    backward, 4 times: the same, v once more over model; and the gradients of w and v,
    scattered over data. Where h is 256 x 1024 values of 2 bytes = 524288 and a quarter of a
    weight 1024 x 1024 = 2097152."""
    text = fixture("auto")
    assert (text.count(" all-gather("), text.count(" all-reduce(")) == (14, 3)
    rows = ms.collectives(text, GRID)
    h, w = 524288, 2097152
    assert rows.by("kind", "axes") == {
        ("all-gather", ("model",)): (12, 12 * h, 12 * h * 3 / 4),
        ("all-gather", ("data",)): (16, 16 * w, 16 * w / 2),
        ("reduce-scatter", ("model",)): (8, 8 * h, 8 * h * 3 / 4),
        ("reduce-scatter", ("data",)): (8, 8 * w, 8 * w / 2),
    }


@pytest.mark.parametrize("name", ["kinds", "fsdp", "auto"])
def test_xla_counts_the_same_instructions(name):
    """XLA's own reader and ours, on the text of another backend."""
    reader = pytest.importorskip("jaxlib._hlo")
    counted = {}
    for computation in reader.hlo_module_from_text(fixture(name)).computations():
        for instruction in computation.instructions():
            code = str(instruction.opcode).removeprefix("HloOpcode.k")
            counted[code] = counted.get(code, 0) + 1
    ours = {}
    program = hlo.parse(fixture(name))
    assert program.unread == ()
    for instruction in program.instructions():
        code = "".join(part.title() for part in instruction.opcode.split("-"))
        ours[code] = ours.get(code, 0) + 1
    for code in ("AllGather", "AllReduce", "ReduceScatter", "CollectivePermuteStart", "While"):
        assert ours.get(code, 0) == counted.get(code, 0)


# Trip counts


def counted(n, start=0, step=1):
    """A loop that a program compiled for CPU says it runs, and the same text unsaid."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    turn = lambda i, x: jax.lax.psum(jnp.tanh(x), "data")  # noqa: E731

    def f(x):
        return jax.lax.fori_loop(0, n, turn, x)

    mapped = jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    text = jax.jit(mapped).lower(np.ones(8, np.float32)).compile().as_text()
    return mesh, text, re.sub(r'"known_trip_count":\{"n":"\d+"\}', "", text)


def test_a_count_that_is_not_printed_is_worked_out_or_unknown():
    mesh, said, unsaid = counted(7)
    assert [row.executions for row in ms.collectives(said, mesh)] == [7]
    assert [row.executions for row in ms.collectives(unsaid, mesh)] in ([7], [None])


@pytest.mark.parametrize(
    ("change", "executions"),
    [
        (("constant(5)", "constant(5)"), 5),
        (("constant(5)", "constant(9)"), 9),
        (("direction=LT", "direction=GT"), None),
        (("direction=LT", "direction=NE"), None),
    ],
)
def test_a_tpu_loop_is_counted_by_its_counter(change, executions):
    text = fixture("kinds").replace(*change)
    loops = {row.executions for row in ms.collectives(text, GRID) if row.inside_loop}
    assert loops == {executions}
