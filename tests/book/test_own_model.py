"""Train your own Flax model, start to finish: the page, and its program in examples/own_model.py."""

import ast
import inspect
import pathlib
import re

import jax
import numpy as np
import pytest
from flax import nnx

import many_devices.model
import meshscope as ms
from defined import program_at
from pages import BOOK, cells_of, compiled_for_cpu, run, with_fault

PAGE = "own-model"
FILE = BOOK.parent / "examples" / "own_model.py"


def definitions(source):
    """Functions, classes and the table of rules, as syntax trees."""
    named = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            named[node.name] = ast.dump(node)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("RULES", "TEXT"):
            named[ast.unparse(node.targets[0])] = ast.dump(node)
    return named


def compiled(page, model, optimizer):
    """The step for a batch of the page, compiled for its eight devices."""
    with jax.set_mesh(page.mesh):
        step = page.compiled_step(page.step, model, optimizer)
        return step.lower(model, optimizer, page.batch_of(0, page.mesh)).compile()


@pytest.fixture(scope="module")
def program(page):
    """The page's model is on four devices in the end, so we load it on eight again."""
    return compiled(page, *page.resume(page.checkpoint, page.mesh))


@pytest.fixture(scope="module")
def whole(page):
    """The same eighty steps on one device, never stopped."""
    mesh = page.mesh_of(jax.devices()[:1])
    with jax.set_mesh(mesh):
        model, optimizer = jax.jit(page.make)()
    return page.train(model, optimizer, mesh, until=80)


def test_the_file_is_the_program_of_the_page():
    """Every definition of the page is in examples/own_model.py, and that file adds `main` alone."""
    shown = {}
    for cell in cells_of(PAGE):
        shown |= definitions(cell.source) if cell.in_view else {}
    in_file = definitions(FILE.read_text("utf-8"))
    del in_file["main"]
    assert in_file == shown


def test_the_compiled_step_is_that_of_chapter_4(page):
    of_chapter_4 = inspect.getsource(many_devices.model.compiled_step)
    assert any(of_chapter_4 in cell.source + "\n" for cell in cells_of(PAGE))


def shown_first():
    """What the page says, before any code, that its file prints."""
    (block,) = re.findall(r"```text\n(.*?)```", (BOOK / f"{PAGE}.md").read_text("utf-8"), re.S)
    return block


def test_what_the_file_prints_is_what_the_page_finds(page):
    """Bytes exactly; losses roughly, because the text is the source code of the installed Flax."""
    devices, held, all_of_it, *losses = re.findall(r"[\d.,]*\d", shown_first())
    with jax.set_mesh(page.mesh):
        memory = ms.memory(jax.jit(page.make)()[0])
    assert int(devices) == page.mesh.size
    assert held == f"{memory.bytes_per_device:,}" and all_of_it == f"{memory.unique_bytes:,}"
    first, later, unstopped = page.after("train").losses, page.losses, page.expected
    found = [0, first[0], 39, first[39], page.half.size]
    found += [40, later[40], unstopped[40], 41, later[41], unstopped[41], 79, later[79]]
    np.testing.assert_allclose([float(number) for number in losses], found, rtol=0.1)


def test_eight_devices_give_the_losses_of_one(page, whole):
    """FSDP changes where numbers are, not what they are."""
    first = page.after("train").losses
    assert list(first) == list(range(40))
    np.testing.assert_allclose([*first.values()], [*whole[2].values()][:40], rtol=1e-3)


def test_a_run_resumed_on_four_devices_goes_on_as_if_it_had_never_stopped(page, whole):
    """Steps 40 to 79, from the checkpoint that eight devices wrote, have the losses of one device."""
    assert list(page.losses) == list(range(40, 80))
    np.testing.assert_allclose([*page.losses.values()], [*whole[2].values()][40:], rtol=5e-3)
    assert page.losses[79] < 0.5 * page.after("train").losses[0]
    assert list(page.expected) == [40, 41]  # as printed: the same steps without the restart
    for number, expected in page.expected.items():
        np.testing.assert_allclose(page.losses[number], expected, rtol=1e-3)


def test_the_first_loss_after_a_restart_does_not_depend_on_the_moments(page):
    """With moments of zero in place of those saved, the first loss is the same, and the second is not."""
    model, optimizer = page.resume(page.checkpoint, page.mesh)
    adam = optimizer.opt_state[0]
    for moments in (adam.mu, adam.nu):
        for _, moment in nnx.to_flat_state(nnx.state(moments)):
            moment.set_value(0 * moment[...])
    _, _, losses = page.train(model, optimizer, page.mesh, until=42)
    np.testing.assert_allclose(losses[40], page.expected[40], rtol=1e-5)
    assert abs(losses[41] - page.expected[41]) > 0.01


def test_what_is_saved_comes_back_bit_for_bit_on_the_other_mesh(page):
    """A checkpoint holds values; the target says how they are sharded."""
    model, optimizer = page.resume(page.checkpoint, page.half)
    again, other = page.resume(page.checkpoint, page.mesh)
    for one, two in zip(
        jax.tree.leaves(nnx.state((model, optimizer))), jax.tree.leaves(nnx.state((again, other)))
    ):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two))
    assert model.head.kernel.sharding.mesh.size == 4 and again.head.kernel.sharding.mesh.size == 8


def test_each_device_holds_an_eighth_of_what_is_sharded_and_copies_of_the_rest(page):
    """A little more than one eighth, because every device has its own copy of biases and scales."""
    for path, weight in nnx.to_flat_state(nnx.state(page.after("make").model, nnx.Param)):
        piece = weight.sharding.shard_shape(weight.shape)
        small = path[-1] in ("bias", "scale")
        assert np.prod(piece) * (1 if small else 8) == weight.size, path


def test_the_moments_are_sharded_as_their_weights(page):
    """nnx.Optimizer gives each moment the sharding that it finds in the metadata of its weight."""
    model, optimizer = page.after("make").model, page.after("make").optimizer
    weights = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    adam = optimizer.opt_state[0]
    for moments in (adam.mu, adam.nu):
        found = dict(nnx.to_flat_state(nnx.state(moments)))
        assert found.keys() == weights.keys()
        for path, moment in found.items():
            assert moment.sharding.is_equivalent_to(weights[path].sharding, moment.ndim), path


def test_no_device_ever_holds_a_whole_model(page):
    """Through jax.jit, all is less than the whole model; without, each device holds the model whole."""
    with jax.set_mesh(page.mesh):
        program = jax.jit(page.make).lower().compile()
        eager = page.Transformer(V=256, D=64, H=4, L=2, rngs=nnx.Rngs(0))
    whole_model = ms.memory(page.model).unique_bytes
    assert ms.memory(program).bytes_per_device < whole_model
    assert ms.memory(eager).bytes_per_device == whole_model


def test_a_weight_that_no_rule_matches_is_an_error(page):
    with pytest.raises(KeyError, match="no rule for blocks/0/up/kernle"):
        page.spec_of(("blocks", 0, "up", "kernle"))


BROKEN = {  # what is planted: line, replacement, and what the check reports
    "weights-whole": (
        "out_shardings=(*shardings, None)",
        "out_shardings=jax.NamedSharding(mesh, P())",
        "differs",
    ),
    "batch-small": (
        "mesh, size=16, length=65)",
        "mesh, size=8, length=17)",
        "activations move",
    ),
    "vocabulary-large": ("Transformer(V=256,", "Transformer(V=8192,", "activations move"),
    "embedding-along-D": (
        '(r"embed/embedding", P("data", None))',
        '(r"embed/embedding", P(None, "data"))',
        "activations move",
    ),
}


@pytest.mark.parametrize("mistake", BROKEN)
def test_the_check_catches_each_mistake(mistake):
    """A weight whole, a batch too small to stay or smaller than V, an embedding that moves vectors."""
    find, replace, reported = BROKEN[mistake]
    cells = with_fault(cells_of(PAGE), find, replace)
    with pytest.raises(AssertionError, match=reported), run(PAGE, cells=cells):
        pass


def test_a_batch_that_the_devices_do_not_divide_raises(page):
    """The number of examples must be a multiple of the number of devices."""
    with pytest.raises(ValueError, match="evenly divide the shape"):
        page.batch_of(0, page.mesh, size=12)


@compiled_for_cpu
def test_a_small_batch_fails_the_check_as_the_page_shows(page):
    """Eight examples of 16 tokens: the tokens move, and arrays with the shape of activations."""
    model, optimizer = page.resume(page.checkpoint, page.mesh)
    page.check_moves(model, optimizer, page.mesh, page.batch_of(0, page.mesh))
    assert page.small.shape == (8, 17)
    with pytest.raises(AssertionError, match="activations move") as caught:
        page.check_moves(model, optimizer, page.mesh, page.small)
    assert str(caught.value) == "activations move: [(8, 16, 1), (8, 16, 64)]"  # B, S and D
    with jax.set_mesh(page.mesh):
        step = page.compiled_step(page.step, model, optimizer)
        rows = ms.collectives(step.lower(model, optimizer, page.small).compile())
    assert {row.dtype for row in rows if row.shape == (8, 16, 1)} == {"int32"}  # tokens


@compiled_for_cpu
@pytest.mark.parametrize("vocabulary, size, length", [(64, 8, 17), (256, 8, 65)])
def test_with_more_tokens_than_the_vocabulary_has_entries_the_check_passes(
    vocabulary, size, length
):
    """A smaller vocabulary for the small batch, or more tokens in it: only weights move."""
    cells = with_fault(cells_of(PAGE), "Transformer(V=256,", f"Transformer(V={vocabulary},")
    with run(PAGE, cells=cells, until="check-moves") as page:
        batch = page.batch_of(0, page.mesh, size=size, length=length)
        page.check_moves(page.model, page.optimizer, page.mesh, batch)


@compiled_for_cpu
def test_in_this_small_model_the_compiler_would_shard_by_examples_without_the_constraints(program):
    """As much moves, and the check passes, if both calls of with_sharding_constraint are deleted."""
    cells = [
        cell._replace(
            source=re.sub(
                r"jax\.lax\.with_sharding_constraint\((x_BSD|self\.embed\(tokens_BS\)), P\(\"data\"\)\)",
                r"\1",
                cell.source,
            )
        )
        for cell in cells_of(PAGE)
    ]
    assert sum("with_sharding_constraint" in cell.source for cell in cells) == 1  # in shard
    with run(PAGE, cells=cells, until="check-moves") as page:
        without = moved(compiled(page, page.model, page.optimizer))
    assert without == moved(program)


@compiled_for_cpu
def test_a_stack_of_layers_moves_the_slice_of_a_single_layer(page):
    """So the check reports shapes of weights without the dimension of layers, and nothing else."""
    cells = cells_of(PAGE)
    for find, replace in STACKED.items():
        cells = with_fault(cells, find, replace)
    with pytest.raises(AssertionError, match="activations move: ") as caught:
        with run(PAGE, cells=cells):
            pass
    assert caught.value.cell == "check-moves"
    reported = set(ast.literal_eval(str(caught.value).removeprefix("activations move: ")))
    slices = {weight.shape for _, weight in page.weights_of(page.Block(64, 4, nnx.Rngs(0)))}
    assert reported <= slices and (64, 4, 16) in reported


STACKED = {  # the list of blocks becomes one block whose weights have a first dimension for layers
    "nnx.List([Block(D, H, rngs) for _ in range(L)])": (
        "nnx.vmap(lambda rngs: Block(D, H, rngs))(rngs.split(L))"
    ),
    "        for block in self.blocks:\n            x_BSD = block(x_BSD)\n": (
        "        x_BSD, _ = jax.lax.scan(lambda x, block: (block(x), None), x_BSD, self.blocks)\n"
    ),
    "            return spec\n": (
        "            return P(None, *spec) if 'blocks' in path else spec\n"
    ),
}


def moved(program):
    """Bytes of each kind of collective."""
    totals = ms.collectives(program).by("kind")
    return {kind: total.payload_bytes for kind, total in totals.items()}


@pytest.fixture(scope="module")
def dropped():
    """The program of the page with `jax.checkpoint` around each block."""
    cells = with_fault(
        cells_of(PAGE),
        "            x_BSD = block(x_BSD)",
        "            x_BSD = jax.checkpoint(lambda block, x_BSD: block(x_BSD))(block, x_BSD)",
    )
    with run(PAGE, cells=cells, until="check-moves") as page:
        yield compiled(page, page.model, page.optimizer)


def in_blocks(page):
    """Bytes of the sharded weights of all blocks."""
    return 4 * sum(
        weight.size
        for path, weight in nnx.to_flat_state(nnx.state(page.model.blocks, nnx.Param))
        if path[-1] == "kernel"
    )


@compiled_for_cpu
def test_with_checkpoint_around_each_block_its_weights_are_gathered_twice(page, program, dropped):
    """Without it, each sharded weight is gathered once."""
    once, twice = moved(program)["all-gather"], moved(dropped)["all-gather"]
    assert once == in_blocks(page) + 2 * 4 * 256 * 64  # and embedding and head
    assert twice == once + in_blocks(page)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="on 0.10 both take the same memory")
@compiled_for_cpu
def test_with_checkpoint_around_each_block_its_weights_are_freed(page, program, dropped):
    """Without it, a device comes to hold nearly all weights whole; with it, those of one block."""
    kept, freed = (ms.memory(it).temporaries for it in (program, dropped))
    assert kept > ms.memory(page.model).unique_bytes and kept - freed > in_blocks(page) / 2


def test_a_target_has_the_shardings_that_set_metadata_recorded(page):
    """Resuming reads them too: without set_metadata, every weight of the target is whole."""

    def target_of(page):
        model, _ = nnx.merge(*nnx.get_abstract_model(page.make, page.mesh))
        return dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))

    for path, weight in target_of(page).items():
        wanted = jax.NamedSharding(page.mesh, page.spec_of(path))
        assert weight.sharding.is_equivalent_to(wanted, weight.ndim), path
    line = "        weight.set_metadata(out_sharding=spec)\n"
    with run(PAGE, cells=with_fault(cells_of(PAGE), line, ""), until="make") as without:
        assert all(weight.sharding.is_fully_replicated for weight in target_of(without).values())


def test_a_vocabulary_that_the_devices_do_not_divide_leaves_the_embedding_whole():
    """The rule for the embedding needs a V that eight devices divide, and only the check tells."""
    cells = with_fault(cells_of(PAGE), "Transformer(V=256,", "Transformer(V=257,")
    with run(PAGE, cells=cells, until="make") as page:
        assert page.model.embed.embedding.sharding.is_fully_replicated
    with pytest.raises(AssertionError, match="'embedding'.* differs") as caught:
        with run(PAGE, cells=cells):
            pass
    assert caught.value.cell == "check-shardings"
    assert 50_257 % 8


def test_the_file_trains_on_one_and_on_two_devices(tmp_path, capsys, monkeypatch):
    """examples/own_model.py, called as its head says."""
    program = program_at(FILE)
    devices = jax.devices()[:2]
    monkeypatch.setattr(program.jax, "devices", lambda *_: devices)
    monkeypatch.setattr(program.sys, "argv", ["own_model.py", str(tmp_path / "run")])
    program.main()
    said = capsys.readouterr().out
    assert said.startswith("2 devices, ") and "\nresumed on 1 devices\n" in said
    form = re.compile(r"\d[\d.,]*")
    assert form.sub("#", said) == form.sub("#", shown_first())
    assert pathlib.Path(tmp_path, "run", "40").is_dir()
