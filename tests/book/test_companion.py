"""What the package many_devices offers is what the pages show."""

import ast
import inspect

import pytest

from many_devices import (
    checkpoints,
    experts,
    fsdp,
    helpers,
    llama,
    logical,
    memory,
    model,
    pipeline,
    processes,
    sequences,
    serving,
    stack,
    training,
)
from pages import cells_of

# Where a page introduces what later pages import: the same statements, apart from layout.
SHOWN = [
    ("01-mesh", helpers.put),
    ("01-mesh", helpers.traffic),
    ("03c-stacks", stack.make_stack),
    ("03c-stacks", stack.run_stack),
    ("04-train", model.Strategy),
    ("04-train", model.shuffled),
    ("04-train", model.batch_of),
    ("04-train", model.Config),
    ("04-train", model.rms_norm),
    ("04-train", model.pinned),
    ("04-train", model.Block),
    ("04-train", model.Model),
    ("04-train", model.loss_of),
    ("04-train", model.make),
    ("04-train", model.step),
    ("04-train", model.compiled_step),
    ("04b-memory", memory.state),
    ("04b-memory", memory.kept),
    ("04b-memory", memory.kept_gb),
    ("04f-what-strategies-send", training.sent_mb),
    ("05-checkpoint", logical.mesh_of),
    ("05-checkpoint", checkpoints.make_run),
    ("05-checkpoint", checkpoints.new_run),
    ("05-checkpoint", checkpoints.batch_at),
    ("05-checkpoint", checkpoints.restore),
    ("05-checkpoint", checkpoints.train),
    ("05-checkpoint", checkpoints.open_series),
    ("05-checkpoint", checkpoints.start),
    ("05-checkpoint", checkpoints.train_until),
    ("07-explicit", helpers.type_of),
    ("09e-any-module", fsdp.global_norm),
    ("11-processes", processes.data_mesh),
    ("11-processes", processes.rows_here),
    ("own-weights", llama.header_of),
    ("own-weights", llama.linear),
    ("own-weights", llama.norm),
    ("own-weights", llama.Block),
    ("own-weights", llama.Llama),
    ("own-weights", llama.read),
    ("own-weights", llama.read_tensor),
    ("own-weights", llama.read_stack),
    ("own-weights", llama.by_path),
    ("own-weights", llama.load),
    ("12-pipeline", pipeline.error),
    ("13-experts", experts.route),
    ("13b-load-balance", experts.balance_of),
    ("13-experts", experts.feed_forward),
    ("13-experts", experts.loss_of),
    ("13-experts", experts.program_on),
    ("14-sequences", sequences.merge),
    ("15-serving", serving.write),
    ("15-serving", serving.attend),
]

# Where the package does more than the page: what it has, and what the page shows in its place.
POLICIES = """\
    to_save = [when.FixedIntervalPolicy(2), when.PreemptionCheckpointingPolicy()]
    to_keep = [keep.LatestN(2), keep.EveryNSteps(4)]
"""
MORE = {
    checkpoints.open_series: {
        POLICIES: "",
        "when.AnySavePolicy(to_save)": "when.FixedIntervalPolicy(2)",
        "keep.AnyPreservationPolicy(to_keep)": "keep.LatestN(2)",
    },
}


def definitions(source):
    """The functions and classes that a source defines, as syntax trees without docstrings."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            for inner in ast.walk(node):
                if isinstance(inner, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(inner):
                    inner.body = inner.body[1:]
            found[node.name] = ast.dump(node)
    return found


@pytest.mark.parametrize("page, offered", SHOWN, ids=lambda it: getattr(it, "__name__", it))
def test_the_page_shows_what_the_package_offers(page, offered):
    shown = {}
    for cell in cells_of(page):
        shown |= definitions(cell.source)
    source = inspect.getsource(offered)
    for more, in_its_place in MORE.get(offered, {}).items():
        assert source.count(more) == 1, more
        source = source.replace(more, in_its_place)
    assert shown[offered.__name__] == definitions(source)[offered.__name__]
