"""What a compiled program's text may look like: spellings, async pairs, other backends."""

import dataclasses
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
from effort import examples
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
@settings(max_examples=examples(200), deadline=None)
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


@pytest.mark.parametrize(
    "broken", [GOOD.replace("{{0,1,2,3},{4,5,6,7}}", "<<0,1,2,3>>"), GOOD.replace("%p", "%nobody")]
)
def test_what_follows_a_line_that_cannot_be_read_counts(broken):
    good = module([GOOD])
    line = next(s for s in good.split("\n") if " all-reduce(" in s)
    text = good.replace(line, "  " + broken.replace("%r", "%first") + "\n" + line)
    with pytest.warns(ms.UnparsedCollectiveWarning, match="cannot read"):
        rows = ms.collectives(text, GRID)
    assert rows.by("kind", "axes") == {("all-reduce", ("model",)): (1, 128, 192)}


def test_a_host_transfer_is_no_collective_and_a_send_is_one():
    """A send and a receive have pairs in place of groups, or say nothing of them."""
    lines = [
        "%token_ = token[] after-all()",
        "%s = (f32[8,4]{1,0}, u32[], token[]) send(%p, %token_), channel_id=7",
        "%t = token[] send-done(%s), channel_id=7",
        "%v = (f32[8,4]{1,0}, u32[], token[]) recv(%t), channel_id=8",
        "%w = (f32[8,4]{1,0}, token[]) recv-done(%v), channel_id=8",
    ]
    rows = ms.collectives(module(lines), GRID)
    assert [(row.kind, row.shape, row.axes) for row in rows] == [
        ("send", (8, 4), ("?",)), ("recv", (8, 4), ("?",))]  # fmt: skip
    assert all(row.within == ("data", "model") for row in rows)
    to_host = [line.replace("channel_id", "is_host_transfer=true, channel_id") for line in lines]
    assert not ms.collectives(module(to_host), GRID)


def test_an_all_to_all_of_several_values_is_one_of_all_of_them():
    """XLA writes one operand for each device of a group: together they are the payload."""
    line = (
        "%z = (f32[8,4]{1,0}, f32[8,4]{1,0}) all-to-all(%p, %p), channel_id=1, "
        "replica_groups={{0,4},{1,5},{2,6},{3,7}}"
    )
    (row,) = ms.collectives(module([line]), GRID)
    assert (row.kind, row.axes, row.shape, row.payload_bytes) == (
        "all-to-all",
        ("data",),
        (2, 8, 4),
        256,
    )


def test_a_group_without_devices_has_one():
    """As of a row whose groups the program does not tell."""
    (row,) = ms.collectives(module([GOOD]), GRID)
    assert row.group_size == 4
    assert dataclasses.replace(row, groups=()).group_size == 1


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


# Programs compiled for a TPU (fixtures/README.md); programs in fixtures/make.py


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


# What several fusions carry on


def chain(start="%x", step="all-gather", channel=1, more="", fused=""):
    """A gather of %x in a start, a step and an end, as on TPU, all with one channel; and more.

    The step also computes something: its third result. `fused`: computations for `more`.
    """
    gather = f"{step}(%p), channel_id={{}}, replica_groups=[1,8]<=[8], dimensions={{{{0}}}}"
    one = gather.format(channel)
    state = "(f32[8,16], f32[64,16], u32[])"
    return f"""HloModule m, is_scheduled=true, num_partitions=8

%start (p: f32[8,16]) -> {state} {{
  %p = f32[8,16]{{1,0}} parameter(0)
  %g = f32[64,16]{{1,0}} {one}
  ROOT %c = {state} custom-call(%g), custom_call_target="AsyncCollectiveStart"
}}

%step (p: f32[8,16], q: f32[64,16], s: u32[], z: f32[8,16]) -> (f32[8,16], f32[64,16], f32[8,16], u32[]) {{
  %p = f32[8,16]{{1,0}} parameter(0)
  %q = f32[64,16]{{1,0}} parameter(1)
  %s = u32[] parameter(2)
  %z = f32[8,16]{{1,0}} parameter(3)
  %n = f32[8,16]{{1,0}} negate(%z)
  %g = f32[64,16]{{1,0}} {one}
  ROOT %t = (f32[8,16], f32[64,16], f32[8,16], u32[]) tuple(%p, %g, %n, %s)
}}

%done (p: f32[8,16], q: f32[64,16], s: u32[]) -> f32[64,16] {{
  %p = f32[8,16]{{1,0}} parameter(0)
  %q = f32[64,16]{{1,0}} parameter(1)
  %s = u32[] parameter(2)
  %g = f32[64,16]{{1,0}} {one}
  ROOT %c = f32[64,16] custom-call(%p, %q, %g, %s), custom_call_target="AsyncCollectiveDone"
}}

{fused}
ENTRY %main (x: f32[8,16], y: f32[8,16], w: f32[8,32]) -> f32[64,16] {{
  %x = f32[8,16]{{1,0}} parameter(0)
  %y = f32[8,16]{{1,0}} parameter(1)
  %w = f32[8,32]{{1,0}} parameter(2)
  %f1 = {state} fusion(%x), kind=kCustom, calls=%start
  %a1 = f32[8,16]{{1,0}} get-tuple-element(%f1), index=0
  %b1 = f32[64,16]{{1,0}} get-tuple-element(%f1), index=1
  %c1 = u32[] get-tuple-element(%f1), index=2
  %f2 = (f32[8,16], f32[64,16], f32[8,16], u32[]) fusion(%a1, %b1, %c1, %y), kind=kCustom, calls=%step
  %a2 = f32[8,16]{{1,0}} get-tuple-element(%f2), index=0
  %b2 = f32[64,16]{{1,0}} get-tuple-element(%f2), index=1
  %n2 = f32[8,16]{{1,0}} get-tuple-element(%f2), index=2
  %c2 = u32[] get-tuple-element(%f2), index=3
  %k2 = f32[8,16]{{1,0}} copy(%a2)
{more}
  ROOT %f3 = f32[64,16]{{1,0}} fusion(%k2, %b2, %c2), kind=kCustom, calls=%done
}}
"""


def fused(columns, attributes="dimensions={0}", groups="[1,8]<=[8]"):
    return (
        f"%other (p: f32[8,{columns}]) -> f32[64,{columns}] {{\n"
        f"  %p = f32[8,{columns}]{{1,0}} parameter(0)\n"
        f"  ROOT %g = f32[64,{columns}]{{1,0}} all-gather(%p), channel_id=1, "
        f"replica_groups={groups}, {attributes}\n}}\n"
    )


def test_a_start_its_steps_and_its_end_count_once():
    assert ms.collectives(chain(), LINE).by("kind") == {"all-gather": (1, 4096, 3584)}


@pytest.mark.parametrize(
    ("operand", "columns"),
    [
        ("%w", 32),  # of another size
        ("%y", 16),  # of the same size, of another value
        ("%n2", 16),  # of what the step computed
        ("%x", 16),  # of the same value, but in a fusion that has no part in the chain
    ],
)
def test_collectives_that_share_a_channel_are_not_merged(operand, columns):
    """JAX gives every collective that is written by hand channel 1."""
    more = f"  %o = f32[64,{columns}]{{1,0}} fusion({operand}), kind=kCustom, calls=%other"
    text = chain(more=more, fused=fused(columns))
    rows = ms.collectives(text, LINE)
    assert sorted(row.shape for row in rows) == sorted([(64, 16), (64, columns)])
    assert rows.total_payload_bytes == 4 * 64 * (16 + columns)


@pytest.mark.parametrize(
    "passing",
    [
        "  %k2 = f32[8,16]{1,0} copy(%a2)",
        "  %k2 = f32[8,16]{1,0} bitcast(%a2)",
        "  %t = (f32[64,16], f32[8,16]) tuple(%b2, %a2)\n"
        "  %k2 = f32[8,16]{1,0} get-tuple-element(%t), index=1",
        "  %t = (f32[64,16], f32[8,16]) tuple(%b2, %a2)\n"
        "  %u = (f32[64,16], f32[8,16]) copy(%t)\n"
        "  %k2 = f32[8,16]{1,0} get-tuple-element(%u), index=1",
    ],
)
@pytest.mark.parametrize("where", [None, "%b1", "%c1"])
def test_a_chain_is_followed_through_what_only_passes_values_on(passing, where):
    """A copy, another view of the same bytes, a tuple and its elements: no new value."""
    text = chain().replace("  %k2 = f32[8,16]{1,0} copy(%a2)", passing)
    if where:  # the same between the start and the step
        there = re.sub(r"%(k2|t|u)\b", r"%\1_", passing).replace("%a2", "%a1").replace("%b2", "%b1")
        before, after = text.split("  %f2 = ", 1)
        text = before + there + "\n  %f2 = " + after.replace("fusion(%a1,", "fusion(%k2_,", 1)
    assert ms.collectives(text, LINE).by("kind") == {"all-gather": (1, 4096, 3584)}


def test_two_exchanges_of_one_value_differ_by_their_dimension():
    """One goes on in the step of a chain; the other, along another dimension, begins there."""
    step = chain().split("%step", 1)[1].split("\n}", 1)[0]
    other = step.replace("dimensions={0}", "dimensions={1}").replace(
        "f32[64,16]{1,0} all-", "f32[8,128]{1,0} all-"
    )
    text = chain().replace(step, other)
    assert sorted(row.shape for row in ms.collectives(text, LINE)) == [(8, 128), (64, 16)]


@pytest.mark.parametrize(
    "other", [("all-gather(%p)", "all-gather(%z)"), ("[1,8]<=[8]", "{{7,6,5,4,3,2,1,0}}")]
)
def test_what_a_step_exchanges_besides_counts(other):
    """Another value, or the same in another order of devices, is not what the start began."""
    step = chain().split("%step", 1)[1].split("\n}", 1)[0]
    text = chain().replace(step, step.replace(*other))
    assert ms.collectives(text, LINE).by("kind") == {"all-gather": (2, 8192, 7168)}


def test_only_a_start_begins_a_chain():
    """A fusion that gathers and hands its input on has finished when it returns."""
    both = (
        "%both (p: f32[8,16]) -> (f32[8,16], f32[64,16]) {\n  %p = f32[8,16]{1,0} parameter(0)\n"
        "  %g = f32[64,16]{1,0} all-gather(%p), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}\n"
        "  ROOT %t = (f32[8,16], f32[64,16]) tuple(%p, %g)\n}\n"
    )
    more = (
        "  %o1 = (f32[8,16], f32[64,16]) fusion(%y), kind=kCustom, calls=%both\n"
        "  %o2 = f32[8,16]{1,0} get-tuple-element(%o1), index=0\n"
        "  %o3 = (f32[8,16], f32[64,16]) fusion(%o2), kind=kCustom, calls=%both"
    )
    rows = ms.collectives(chain(more=more, fused=both), LINE)
    assert rows.by("kind") == {"all-gather": (3, 3 * 4096, 3 * 3584)}


def test_a_fusion_that_names_nothing_hides_nothing_else():
    more = "  %o = f32[8,16]{1,0} fusion(%y), kind=kLoop"
    assert ms.collectives(chain(more=more), LINE).by("kind") == {"all-gather": (1, 4096, 3584)}


@pytest.mark.parametrize(
    "line", ["call(%p), to_apply=%nobody", "conditional(%p)", "while(%p), body=%nobody"]
)
def test_a_call_of_what_is_not_in_the_text_calls_nothing(line):
    text = module([GOOD]).replace(
        "  ROOT %last", f"  %odd = f32[8,4]{{1,0}} {line}\n  ROOT %last", 1
    )
    assert ms.collectives(text, GRID).by("kind") == {"all-reduce": (1, 128, 192)}


def test_a_name_of_an_operation_calls_nothing():
    """Only attributes do, and metadata may hold any text."""
    hidden = (
        "%hidden (q: f32[8,4]) -> f32[8,4] {\n  %q = f32[8,4] parameter(0)\n  ROOT %h = f32[8,4] "
    )
    hidden += "all-reduce(%q), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add\n}\n\n"
    said = 'copy(%p), metadata={op_name="f(calls=%hidden"}'
    text = module([GOOD]).replace("copy(%p)", said).replace("ENTRY", hidden + "ENTRY")
    with pytest.warns(ms.UnparsedCollectiveWarning):
        rows = ms.collectives(text, GRID)
    assert rows.by("kind") == {"all-reduce": (1, 128, 192)}


def test_a_size_that_is_a_bound_is_read():
    read = hlo._instruction("  %x = f32[<=8,4]{1,0} copy(%p)")
    assert read.arrays == (("f32", (8, 4)),)


def test_two_chains_at_once_count_twice():
    """Each start is one collective, whatever is going on beside it."""
    text = chain(
        more="\n".join(
            line.replace("%f", "%h").replace("%a", "%i").replace("%b", "%j").replace("%c", "%l")
            .replace("%n2", "%m2").replace("%k2", "%o2").replace("fusion(%x)", "fusion(%y)")
            .replace("fusion(%i1, %j1, %l1, %y)", "fusion(%i1, %j1, %l1, %n2)")
            .replace("ROOT %f3", "%h3")
            for line in chain().split("\n") if line.lstrip().startswith(("%f1", "%a", "%b", "%c1", "%c2",
                "%f2", "%n2", "%k2", "ROOT %f3"))
        )
    )  # fmt: skip
    # The computations are those of the first chain: each of them is called twice.
    rows = ms.collectives(text, LINE)
    assert len(rows) == 2 and rows.total_payload_bytes == 2 * 4096


# Conditionals


def branches(*sums):
    """A conditional whose branches hold collectives, in a loop of three rounds."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def body(x, i):
        return jax.lax.switch(i % len(sums), sums, x), None

    def f(x):
        return jax.lax.scan(body, x, jnp.arange(3))[0]

    spec = P(("data", "model"))
    mapped = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return ms.collectives(jax.jit(mapped).lower(np.ones((64, 4), np.float32)).compile(), mesh)


def psum(x, axis="model"):
    return jax.lax.psum(jnp.tanh(x), axis)


def test_what_every_branch_does_alike_is_known():
    size = 8 * 4 * 4
    alike = branches(psum, lambda x: 2 * psum(x) + 1)
    assert alike.by("kind", "axes") == {("all-reduce", ("model",)): (3, 3 * size, 3 * size * 3 / 2)}
    assert [row.executions for row in alike] == [3] and alike[0].inside_loop
    both = branches(lambda x: psum(psum(x)), lambda x: psum(psum(x)) + 1)
    assert [row.executions for row in both] == [3, 3]
    one = branches(psum, jnp.sin)
    assert [row.executions for row in one] == [None]
    three = branches(psum, lambda x: psum(x) * 2, lambda x: psum(x) * 3)
    assert [row.executions for row in three] == [3]
    third = branches(psum, lambda x: psum(x) * 2, jnp.sin)
    assert [row.executions for row in third] == [None, None]


def test_branches_that_differ_stay_unknown():
    axes = branches(psum, lambda x: psum(x, "data"))
    assert [(row.axes, row.executions) for row in axes] == [(("model",), None), (("data",), None)]
    twice = branches(psum, lambda x: psum(psum(x)))
    assert sorted((row.executions for row in twice), key=str) == [3, None]
    size = branches(psum, lambda x: jnp.concatenate([psum(x[:4])] * 2))
    assert [row.executions for row in size] == [None, None]
    kind = branches(psum, lambda x: jax.lax.pmax(x, "model"))  # both are all-reduces
    assert [row.executions for row in kind] == [3]
    ring = [(i, (i + 1) % 4) for i in range(4)]
    forth = lambda x: jax.lax.ppermute(x, "model", ring)  # noqa: E731
    back = lambda x: jax.lax.ppermute(x, "model", [(j, i) for i, j in ring])  # noqa: E731
    assert [row.executions for row in branches(forth, lambda x: forth(x) + 1)] == [3]
    assert [row.executions for row in branches(forth, back)] == [None, None]


def test_a_conditional_inside_a_branch():
    inner = lambda x: jax.lax.cond(x[0, 0] > 0, psum, lambda x: psum(x) + 1, x)  # noqa: E731
    assert [row.executions for row in branches(inner, psum)] == [3]
    unsure = lambda x: jax.lax.cond(x[0, 0] > 0, psum, jnp.sin, x)  # noqa: E731
    assert [row.executions for row in branches(unsure, psum)] == [None, None]


# Texts of what is not compiled


def lowered():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    f = jax.shard_map(
        lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    return jax.jit(f).lower(np.ones((64, 16), np.float32))


NOT_COMPILED = {
    "StableHLO": lambda: lowered().as_text(),
    "HLO before it is compiled": lambda: lowered().as_text("hlo"),
    "a dump before optimisations": lambda: module([GOOD]).replace("is_scheduled=true, ", ""),
    "nothing": lambda: "",
    "a word": lambda: "hello",
    "a text without its first line": lambda: module([GOOD]).split("\n", 1)[1],
    "a text without an entry": lambda: module([GOOD]).replace("ENTRY ", ""),
}


@pytest.mark.parametrize("name", NOT_COMPILED)
def test_a_text_that_is_not_compiled_is_refused(name):
    text = NOT_COMPILED[name]()
    says = r"this text is (not a compiled program|a program that is not compiled( to the end)?): pass jax"
    assert ms.collectives(module([GOOD]), LINE)  # while this is read
    for refused in (
        lambda: ms.collectives(text, LINE),
        lambda: ms.collectives(text),
        lambda: ms.diff(lowered().compile(), text),
        lambda: ms.diff(text, text),
    ):
        with pytest.raises(ValueError, match=says):
            refused()


def test_a_refusal_says_what_the_text_is():
    for name, says in [
        ("StableHLO", r"a program that is not compiled: .* begins 'module @jit"),
        ("HLO before it is compiled", "a program that is not compiled: "),
        ("a dump before optimisations", "a program that is not compiled to the end: .* 'HloModule"),
        ("a word", "not a compiled program: .* begins 'hello'"),
    ]:
        with pytest.raises(ValueError, match=says):
            ms.collectives(NOT_COMPILED[name](), LINE)


def test_a_compiled_text_without_a_mesh_asks_for_one():
    with pytest.raises(
        ValueError, match=r"text names no mesh: pass .* collectives\(compiled, mesh\)"
    ):
        ms.diff(lowered().compile(), lowered().compile().as_text())


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
        (("sunk = s32[]{:T(128)} constant(1)", "sunk = s32[]{:T(128)} constant(2)"), 3),
        (("sunk = s32[]{:T(128)} constant(1)", "sunk = s32[]{:T(128)} constant(0)"), None),
        (("constant(0)", "constant(2)"), 3),
        (("constant(0)", "constant(7)"), 0),
        (("direction=LT", "direction=GT"), None),
        (("direction=LT", "direction=NE"), None),
    ],
)
def test_a_tpu_loop_is_counted_by_its_counter(change, executions):
    text = fixture("kinds")
    assert change[0] in text
    text = text.replace(*change)
    loops = {row.executions for row in ms.collectives(text, GRID) if row.inside_loop}
    assert loops == {executions}
