"""What is promised in passing: the order of a list, the words of a refusal, what a missing table means."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import meshscope as ms
from meshscope import _hlo as hlo

P = jax.P
MESH = jax.make_mesh((2, 4), ("data", "model"))


def module(lines, computations=""):
    body = "\n".join(f"  {line}" for line in lines)
    return (
        "HloModule m, is_scheduled=true, num_partitions=8\n\n"
        "%add (a: f32[], b: f32[]) -> f32[] {\n"
        "  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n"
        "  ROOT %c = f32[] add(%a, %b)\n}\n\n"
        f"{computations}\n"
        "ENTRY %main (p: f32[8,4]) -> f32[8,4] {\n"
        f"  %p = f32[8,4]{{1,0}} parameter(0)\n{body}\n"
        "  ROOT %last = f32[8,4]{1,0} copy(%p)\n}\n"
    )


def test_a_line_whose_frames_are_not_in_the_text_has_no_source():
    assert hlo.Sources("").find("%x = f32[] add(%a, %b), metadata={stack_frame_id=3}") is None


def test_only_the_first_line_says_that_a_program_is_compiled():
    """A name of an operation may hold the same words."""
    line = '%x = f32[8,4]{1,0} copy(%p), metadata={op_name="is_scheduled=true"}'
    assert not ms.collectives(module([line]), AbstractMesh((8,), ("data",)))
    with pytest.raises(ValueError, match="not compiled to the end"):
        ms.collectives(module([line]).replace("is_scheduled=true, ", ""), MESH)


@pytest.mark.parametrize("key", [("all-reduce",), ("all-reduce", "data", 1)])
def test_a_key_has_a_value_for_each_field(key):
    x = jax.ShapeDtypeStruct((8, 16), "float32", sharding=jax.NamedSharding(MESH, P("data")))
    table = ms.collectives(jax.jit(lambda x: x.sum(0)).lower(x).compile()).by("kind", "axes")
    with pytest.raises(ValueError):
        table.bytes(*key)
    with pytest.raises(KeyError):
        table[key]
    assert key not in table


@pytest.mark.parametrize("twice", [1, 2, 3])
def test_what_every_branch_does_several_times_is_counted_so_often(twice):
    def branch(name):
        line = "  %{0}{1} = f32[8,4] all-reduce(%{2}), channel_id={3}, replica_groups={{{{0,4}},{{1,5}},{{2,6}},{{3,7}}}}, use_global_device_ids=true, to_apply=%add\n"
        lines = "".join(line.format(name, n, f"q{name}", n + 1) for n in range(twice))
        return (f"%{name} (q{name}: f32[8,4]) -> f32[8,4] {{\n  %q{name} = f32[8,4] parameter(0)\n"
                f"{lines}  ROOT %r{name} = f32[8,4] copy(%{name}0)\n}}\n\n")  # fmt: skip

    conditional = (
        "%b = f32[8,4] conditional(%w, %p, %p), true_computation=%yes, false_computation=%no"
    )
    text = module(["%w = pred[] constant(true)", conditional], branch("yes") + branch("no"))
    rows = ms.collectives(text, AbstractMesh((2, 4), ("data", "model")))
    assert [row.executions for row in rows] == [1] * twice


def test_the_largest_copy_is_listed_first():
    split = jax.NamedSharding(MESH, P("data"))
    tree = {name: jax.ShapeDtypeStruct((n, 40), "float32", sharding=split)
            for name, n in [("small", 24), ("large", 96), ("middle", 48)]}  # fmt: skip
    whole = jax.NamedSharding(MESH, P())
    gather = jax.jit(lambda t: jax.tree.map(lambda w: w * 2, t), out_shardings=whole)
    sizes = [row.elements for row in ms.full_copies(gather.lower(tree).compile(), tree)]
    assert set(sizes) == {960, 1920, 3840}
    assert sizes == sorted(sizes, reverse=True)


def test_a_leaf_that_cannot_be_divided_is_named_whatever_its_sharding():
    from jax._src.sharding_impls import GSPMDSharding  # only instances are public

    hlo_sharding = jax.NamedSharding(MESH, P("model"))._to_xla_hlo_sharding(1)
    lost = GSPMDSharding(tuple(np.array(MESH.devices).flat), hlo_sharding)
    with pytest.raises(ValueError, match=r"does not divide evenly \(leaf layer\.bias\)"):
        ms.show({"layer": {"bias": ((6,), lost), "kernel": ((8,), lost)}})
