"""ms.plan: what it counts is what a transformer with written collectives sends, and how it ranks."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import planned
import pytest

import meshscope as ms

P = jax.P
AUTO = jax.sharding.AxisType.Auto


@pytest.fixture(scope="module")
def plan():
    """DP, FSDP, TP, FSDP × TP and HSDP of the transformer on eight devices."""
    return ms.plan(planned.step, planned.TABLES, 8, axes=planned.AXES)


def test_every_table_is_tried_on_each_mesh_that_it_can_tell_apart(plan):
    found = sorted((outcome.table, outcome.where) for outcome in plan.outcomes)
    assert found == [
        ("DP", "data 8"),
        ("FSDP", "data 8"),
        ("FSDP x TP", "data 2 × model 4"),
        ("FSDP x TP", "data 4 × model 2"),
        ("HSDP", "data 2 × model 4"),
        ("HSDP", "data 4 × model 2"),
        ("TP", "model 8"),
    ]
    assert plan.devices == 8 and all(math.prod(one.mesh.values()) == 8 for one in plan.outcomes)


def test_a_mesh_with_an_axis_inside_an_axis_of_the_torus_is_made_too(monkeypatch):
    """`jax.make_mesh` raises where a mesh axis fills no axis of TPU links, as 8 x 8 on 4 x 4 x 4."""

    def refuse(*sizes, **options):
        raise NotImplementedError("set allow_split_physical_axes to True")

    monkeypatch.setattr(jax, "make_mesh", refuse)
    tables = {"DP": planned.TABLES["DP"]}
    (outcome,) = ms.plan(planned.step, tables, 8, axes=planned.AXES).outcomes
    assert outcome.where == "data 8" and not outcome.error and outcome.memory.arguments


def test_a_program_with_written_collectives_sends_the_closed_form_to_the_byte(plan):
    assert not any(outcome.error for outcome in plan.outcomes)
    for outcome in plan.outcomes:
        assert outcome.counted == outcome.expected, (outcome.table, outcome.where)
    assert plan.differences() == []


def test_the_closed_form_is_that_of_the_textbook(plan):
    """N weights of 4 bytes on a ring: DP 8N(n-1)/n, FSDP 12N(n-1)/n, TP 5 sums of a layer."""
    s = planned.SIZES
    weights = s.L * (4 * s.D * s.H * s.C + 2 * s.D * s.F)
    sent = {one.table: sum(one.expected.values()) for one in plan.outcomes if len(one.where) < 9}
    assert sent["DP"] == 2 * 4 * weights * 7 / 8
    assert sent["FSDP"] == 3 * 4 * weights * 7 / 8
    assert sent["TP"] == 5 * s.L * 2 * (s.B * s.S * s.D * 4) * 7 / 8


def test_devices_share_out_the_operations(plan):
    """2 for each weight and token, three times, and a layer forward once more; and attention."""
    s = planned.SIZES
    rows, matrices = s.B * s.S, 4 * s.D * s.H * s.C + 2 * s.D * s.F
    forward = s.L * (2 * rows * matrices + 4 * rows * s.S * s.H * s.C)
    # JAX leaves out of the second time forward what no gradient needs: the products of o and down.
    again = forward - s.L * (2 * rows * s.F * s.D)
    for outcome in plan.outcomes:
        assert outcome.repeats == pytest.approx(1, abs=0.01), outcome.table
        assert 8 * outcome.flops == pytest.approx(3 * forward + again, rel=0.06)


def test_gradients_of_copies_that_are_summed_whole_are_noticed():
    """HSDP whose weights are cast after they are gathered sums 4 times the bytes over `data`."""
    step = functools.partial(planned.step, cast_first=False)
    plan = ms.plan(step, {"HSDP": planned.TABLES["HSDP"]}, 8, axes=planned.AXES)
    (two_by_four,) = [one for one in plan.outcomes if one.where == "data 2 × model 4"]
    key = "all-reduce", ("data",)
    assert two_by_four.counted[key] == 4 * two_by_four.expected[key]
    rows = {row[1:3] for row in plan.differences()}
    assert rows == {key} and "Not as in closed form" in repr(plan)


def test_memory_is_that_of_the_compiled_step(plan):
    mesh = jax.make_mesh((8, 1), planned.AXES, axis_types=(AUTO,) * 2)
    with jax.set_mesh(mesh):
        program = planned.step(mesh, planned.TABLES["FSDP"]).traced.lower().compile()
    (fsdp,) = [one for one in plan.outcomes if one.table == "FSDP"]
    assert fsdp.memory.arguments == ms.memory(program).arguments
    (dp,) = [one for one in plan.outcomes if one.table == "DP"]
    assert dp.memory.arguments > 5 * fsdp.memory.arguments


# Ranks


def test_what_fits_is_ranked_by_time_and_where_that_is_equal_by_memory(plan):
    keys = [(float(f"{plan.step_seconds(one):.3g}"), one.bytes_per_device) for one in plan.fitting]
    sizes = [size for _, size in keys]
    assert keys == sorted(keys) and sizes != sorted(sizes)


def test_what_does_not_fit_is_ranked_by_memory_and_errors_come_last(plan):
    def step(mesh, rules):
        return breaks(mesh, rules) if rules.get("batch") is None else planned.step(mesh, rules)

    tables = {name: planned.TABLES[name] for name in ("TP", "DP", "FSDP")}
    small = ms.plan(step, tables, 8, axes=planned.AXES, hbm=1e3)
    assert [one.table for one in small.outcomes] == ["FSDP", "DP", "TP"] and not small.fitting


def fake(table, mesh, gigabytes, compute, sent, batch=("data",)):
    """An outcome that computes for so many seconds on an H100."""
    size = int(gigabytes * 1e9)
    chip = ms.CHIPS["h100"]
    return ms.Outcome(
        table,
        {},
        mesh,
        ms.ProgramMemory(size, 0, 0, 0),
        flops=compute * chip.flops,
        expected=sent,
        batch=batch,
    )


def test_what_can_move_meanwhile_hides_and_what_is_waited_for_does_not():
    chip = ms.CHIPS["h100"]
    hidden = fake("FSDP", {"data": 8}, 1, 1.0, {("all-gather", ("data",)): 0.9 * chip.link})
    waited = fake(
        "TP", {"data": 2, "model": 4}, 1, 1.0, {("all-reduce", ("model",)): 0.9 * chip.link}
    )
    longer = fake("FSDP", {"data": 8}, 1, 1.0, {("all-gather", ("data",)): 1.2 * chip.link})
    seconds = [one.step_seconds(chip, as_compiled=False) for one in (hidden, waited, longer)]
    assert seconds == pytest.approx([1.0, 1.9, 1.2])


def test_for_another_chip_a_compiled_program_counts_only_where_there_is_no_closed_form():
    sent, counted = {("all-gather", ("data",)): 1.0}, {("all-gather", ("data",)): 2.0}
    both = ms.Outcome("FSDP", {}, {"data": 8}, expected=sent, counted=counted)
    assert both.wire(as_compiled=False) == sent and both.wire(as_compiled=True) == counted
    assert dataclasses.replace(both, expected=None).wire(as_compiled=False) == counted


def small(hbm):
    return ms.plan(planned.step, {"FSDP": planned.TABLES["FSDP"]}, 8, hbm=hbm)


def test_exactly_the_memory_of_a_device_fits_and_one_byte_more_does_not():
    (outcome,) = small(80e9).fitting
    size = outcome.bytes_per_device
    assert [one.table for one in small(size).fitting] == ["FSDP"]
    too_small = small(size - 1)
    assert too_small.fitting == []
    why = too_small.outcomes[0].why_not(size - 1)
    assert "GB too many" in why and "temporaries" in why and why in repr(too_small)
    state = outcome.memory.arguments
    assert "state and batch alone take" in outcome.why_not(state - 1)


def test_the_obvious_choice_loses_where_few_tokens_meet_wide_layers():
    """FSDP over all devices is the rule of thumb, and fits; with few tokens FSDP × TP sends less."""
    few = planned.Sizes(L=2, D=256, F=1024, H=8, C=32, B=8, S=4)
    many = dataclasses.replace(few, B=64, S=256)

    def best(sizes):
        step = functools.partial(planned.step, sizes=sizes)
        tables = {name: planned.TABLES[name] for name in ("FSDP", "FSDP x TP")}
        plan = ms.plan(step, tables, 8, axes=planned.AXES, chip="v5e")
        return plan.fitting[0].table

    assert best(few) == "FSDP x TP"
    assert best(many) == "FSDP"


# One candidate's error


def breaks(mesh, rules):
    if "heads" in rules:
        raise KeyError("no such layer")
    return planned.step(mesh, rules)


def test_an_error_of_one_candidate_is_said_and_the_rest_goes_on():
    seen = []
    plan = ms.plan(
        breaks,
        {name: planned.TABLES[name] for name in ("TP", "DP", "FSDP")},
        8,
        axes=planned.AXES,
        progress=lambda done, count, outcome: seen.append((done, count, outcome.table)),
    )
    assert {one.table for one in plan.fitting} == {"DP", "FSDP"}
    assert seen == [(1, 3, "TP"), (2, 3, "DP"), (3, 3, "FSDP")]
    failed = plan.outcomes[-1]
    assert failed.error.startswith("KeyError: 'no such layer' (test_plan.py:")
    assert failed.error in repr(plan) and "Does not fit" in plan._repr_html_()


def test_sizes_that_do_not_divide_are_said_in_few_words():
    sizes = dataclasses.replace(planned.SIZES, H=4)
    step = functools.partial(planned.step, sizes=sizes)
    (outcome,) = ms.plan(step, {"TP": planned.TABLES["TP"]}, 8, axes=planned.AXES).outcomes
    assert outcome.memory is None and len(outcome.error) < 330 and "\n" not in outcome.error


def test_what_is_no_step_is_an_error_of_its_candidate():
    plan = ms.plan(lambda mesh, rules: 7, {"DP": {"batch": "data"}}, 8)
    assert "return what jax.jit(train_step).trace(...)" in plan.outcomes[0].error


def test_a_traced_step_alone_is_enough():
    def step(mesh, rules):
        return planned.step(mesh, rules).traced

    plan = ms.plan(step, {"FSDP": planned.TABLES["FSDP"]}, 8)
    (outcome,) = plan.fitting
    assert outcome.expected is None and plan.step_seconds(outcome) > 0
    assert "as compiled for CPU, which another may not do" in repr(plan)


# Results


def test_a_result_is_used_again_for_the_same_program_alone(tmp_path, monkeypatch):
    path = tmp_path / "results.jsonl"
    compiled = []
    lowered = type(jax.jit(abs).trace(1.0).lower())
    plain = lowered.compile
    monkeypatch.setattr(lowered, "compile", lambda *args: compiled.append(1) or plain(*args))
    tables = {name: planned.TABLES[name] for name in ("DP", "FSDP")}
    first = ms.plan(planned.step, tables, 8, results=path)
    lines = path.read_text().splitlines()
    assert len(compiled) == len(lines) == 2 and all(json.loads(line)["memory"] for line in lines)
    again = ms.plan(planned.step, tables, 8, results=path, chip="v5e")
    assert len(compiled) == 2 and [one.flops for one in again.outcomes] == [
        one.flops for one in first.outcomes
    ]
    wider = functools.partial(planned.step, sizes=dataclasses.replace(planned.SIZES, F=128))
    other = ms.plan(wider, tables, 8, results=path)
    assert len(compiled) == 4 and other.outcomes[0].flops != first.outcomes[0].flops


def test_the_closed_form_is_todays_and_not_the_stored_one(tmp_path):
    path = tmp_path / "results.jsonl"
    tables = {"FSDP": planned.TABLES["FSDP"]}
    ms.plan(planned.step, tables, 8, results=path)

    def kept(mesh, rules):
        return dataclasses.replace(planned.step(mesh, rules), gathers=1)

    (outcome,) = ms.plan(kept, tables, 8, results=path).fitting
    assert len(path.read_text().splitlines()) == 1
    assert 2 * outcome.expected["all-gather", ("data",)] == outcome.counted["all-gather", ("data",)]


# Refusals


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"chip": "h900"}, "no chip 'h900', there are v5e"),
        ({"compiler": "gcc"}, "no compiler 'gcc', there are cpu, tpu, gpu"),
        ({"devices": 0}, "0 devices: give at least one"),
        ({"devices": 512, "chip": "v5e"}, "512 devices are more than the 256 TPU v5e"),
        ({"hbm": 0}, "0 bytes of memory"),
        ({"axes": ("model",)}, "a table names the axis 'data', and axes are model"),
    ],
)
def test_what_cannot_be_planned_is_refused(given, says):
    with pytest.raises(ValueError, match=says):
        ms.plan(planned.step, {"DP": {"batch": "data"}}, **{"devices": 8, **given})


def test_tables_that_shard_nothing_are_refused():
    with pytest.raises(ValueError, match="no table shards anything over 8 devices"):
        ms.plan(planned.step, {"none": {}}, 8)


def test_too_few_simulated_devices_are_refused_with_what_to_say():
    with pytest.raises(RuntimeError, match='"jax_num_cpu_devices", 16'):
        ms.plan(planned.step, {"DP": {"batch": "data"}}, 16)


def test_explicit_axes_can_be_asked_for():
    def step(mesh, rules):
        assert set(mesh.axis_types) == {jax.sharding.AxisType.Explicit}
        x = jax.ShapeDtypeStruct((8, 8), "float32", sharding=jax.NamedSharding(mesh, P("data")))
        return jax.jit(lambda x: jnp.tanh(x)).trace(x)

    (outcome,) = ms.plan(step, {"DP": {"batch": "data"}}, 8, explicit=True).outcomes
    assert outcome.error is None and outcome.counted == {}
