"""Chapter 11, "Many processes, one program"."""

import re
import time

import jax
import numpy as np
import pytest

from many_devices.data import images_BI, labels_B, train
from many_devices.processes import START, Auto, Job, run_together, say
from pages import check_exercise, exercises_of, source_of

PAGE = "11-processes"
SECONDS = 4


def lines(life):
    """What a process said, without the launcher's own lines."""
    return life.log[1:-1]


def losses_of(life):
    return np.array([float(line) for line in lines(life) if not line.startswith("reads")])


def losses_in_the_notebook(page):
    """What `fit` says in one process with eight devices: its steps are those of the page's runs."""
    said, before = [], page.variables["say"]
    page.variables["say"] = lambda *words: said.append(" ".join(map(str, words)))
    try:
        page.fit(**page.given)
    finally:
        page.variables["say"] = before
    return np.array([float(line) for line in said if not line.startswith("reads")])


def quoted_blocks():
    """The Python blocks of the page that are not executed: the beginning of a program."""
    return re.findall(r"(?ms)^```python\n(.*?)^```$", source_of(PAGE).read_text("utf-8"))


# Two processes, one mesh


def test_the_page_quotes_the_lines_that_each_program_begins_with():
    """The block on the page is what the launcher writes at the top of each file."""
    (begin,) = quoted_blocks()
    assert begin.strip() == START.strip()


def test_each_process_has_its_own_devices_and_sees_all(page):
    """Two processes of four devices each see the same eight, in one program."""
    for number, life in enumerate(page.hello_logs):
        assert life.code == 0 and life.log[0] == "connected" and life.log[-1] == "ended"
        assert lines(life)[:2] == [f"process {number} of 2", "4 of 8 devices are mine"]


def test_each_holds_half_of_an_array_and_both_know_its_sum(page):
    """Each process holds half of x, and yet both print the sum of all 16 numbers."""
    for number, life in enumerate(page.hello_logs):
        mine = " ".join(map(str, range(8 * number, 8 * (number + 1))))
        assert lines(life)[2:] == [f"my numbers: {mine}", "the sum of all: 120.0"]


# Read, print, save


def test_a_global_array_is_printed_by_shape_and_cannot_be_read(page):
    """print shows only shape and dtype, and np.asarray raises, because neither holds all of it."""
    for life in page.look_logs:
        assert lines(life)[:2] == [
            "print: Array(shape=(16,), dtype=float32)",
            "np.asarray: RuntimeError",
        ]


def test_process_allgather_reads_all_of_it_and_process_0_alone_logs_it(page):
    """process_allgather(x, tiled=True), which both run, returns the whole array; behind
    `if jax.process_index() == 0` process 0 logs what it already has."""
    assert [lines(life)[2:] for life in page.look_logs] == [["process_allgather: 120.0"], []]


# Feed


def test_the_rows_of_a_process_follow_from_the_mesh(page):
    """Half of the rows on the first two meshes; all rows where the border cuts `model`."""
    assert [lines(life) for life in page.rows_logs] == [
        [
            "8 rows, 0 to 7, on data",
            "8 rows, 0 to 7, on data x model",
            "16 rows, 0 to 15, on model x data",
        ],
        [
            "8 rows, 8 to 15, on data",
            "8 rows, 8 to 15, on data x model",
            "16 rows, 0 to 15, on model x data",
        ],
    ]


def all_rows_without_a_shape():
    every_row = np.arange(16.0)
    for names, shape in {("data",): (8,), ("model", "data"): (2, 4)}.items():
        mesh = jax.make_mesh(shape, names, axis_types=(Auto,) * len(shape))
        by_rows = jax.NamedSharding(mesh, jax.P("data"))
        say(len(jax.make_array_from_process_local_data(by_rows, every_row)), *names)


def test_without_the_global_shape_rows_double_where_processes_need_different_rows():
    """Each passes all 16: 32 rows on a mesh with only `data`, 16 where both need all of them."""
    for life in run_together(Job(all_rows_without_a_shape, 2, 4))[0]:
        assert lines(life) == ["32 data", "16 model data"]


def test_each_process_reads_only_its_share(page):
    """Two processes read half of the 64 rows of each batch, four a quarter."""
    for lives, rows in [(page.two_logs, 32), (page.four_logs, 16)]:
        for life in lives:
            assert lines(life)[::2] == [f"reads {rows} rows"] * page.given["steps"]


# The training step


def test_all_processes_of_a_run_have_the_same_losses(page):
    """Each process prints the same losses, to the last digit."""
    assert (len(page.two_logs), len(page.four_logs)) == (2, 4)
    for lives in (page.two_logs, page.four_logs):
        for life in lives:
            assert life.code == 0 and life.log == lives[0].log


def test_one_two_and_four_processes_have_the_same_losses(page):
    """The losses of this notebook, of two processes and of four are the same to rounding."""
    in_notebook = losses_in_the_notebook(page)
    assert len(in_notebook) == page.given["steps"] and in_notebook[-1] < in_notebook[0]
    for lives in (page.two_logs, page.four_logs):
        np.testing.assert_allclose(losses_of(lives[0]), in_notebook, rtol=1e-5)


def test_the_first_loss_is_that_of_the_whole_model_on_the_first_64_rows(page):
    """The same loss without sharding, in a few lines of NumPy."""
    weights = jax.tree.map(np.asarray, page.new_state(page.data_mesh())[0])
    hidden = images_BI[train][:64] @ weights["w_IF"]
    logits = hidden / (1 + np.exp(-hidden)) @ weights["w_FV"]
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    expected = -log_p[np.arange(64), labels_B[train][:64]].mean()
    np.testing.assert_allclose(losses_of(page.two_logs[0])[0], expected, rtol=1e-5)


def test_a_step_is_that_of_one_device(page):
    """Weights and momentum after one step, with the gradient of the same loss without sharding."""
    mesh = page.data_mesh()
    batch = images_BI[train][:64], labels_B[train][:64], np.ones(64, "float32")

    def loss(weights):
        logits_BV = jax.nn.silu(batch[0] @ weights["w_IF"]) @ weights["w_FV"]
        return -jax.nn.log_softmax(logits_BV)[np.arange(64), batch[1]].mean()

    weights, momentum = page.new_state(mesh)
    before = jax.tree.map(np.asarray, weights)  # the step donates its inputs
    gradient = jax.grad(loss)(before)
    after, momentum, _ = page.compiled_step(mesh)(weights, momentum, batch)
    for name, w in before.items():
        np.testing.assert_allclose(momentum[name], gradient[name], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(after[name], w - 0.2 * gradient[name], rtol=1e-4, atol=1e-6)


# Launch


def test_a_process_that_was_not_told_of_the_other_ends_with_code_1(page):
    """`expect` prints how many processes and devices were expected, and how many were found."""
    (alone,) = page.alone
    assert alone.code == 1 and "found 1 and 4." in alone.errors


def test_two_processes_that_know_each_other_go_on(page):
    """They find what they expected, and both go on."""
    assert [life.code for life in page.right] == [0, 0]
    assert all(life.log == ["connected", "as expected", "ended"] for life in page.right)


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)


# What a late process does to gloo: on the page about failures


def meet_late(name, seconds):
    """A collective that compiles, and then one to which process 1 comes later."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(Auto,))
    operation = {"psum_scatter": jax.lax.psum_scatter, "all_gather": jax.lax.all_gather}[name]
    data = jax.P("data")
    mapped = jax.jit(
        jax.shard_map(
            lambda x: operation(x, "data", tiled=True), mesh=mesh, in_specs=data, out_specs=data
        )
    )
    x = jax.device_put(np.arange(64.0), jax.NamedSharding(mesh, data))
    jax.block_until_ready(mapped(x))
    if jax.process_index() == 1:
        time.sleep(seconds)
    try:
        jax.block_until_ready(mapped(x))
        say("they met")
    except jax.errors.JaxRuntimeError as error:
        say(" ".join(str(error).split()))


@pytest.fixture(scope="module")
def ends():
    """What process 0 said of each collective: process 1 came after XLA's limit of four seconds."""
    flag = {"XLA_FLAGS": f"--xla_cpu_collective_timeout_seconds={SECONDS}"}
    names = ["psum_scatter", "all_gather"]
    jobs = [
        Job(meet_late, 2, 2, given={"name": name, "seconds": 2 * SECONDS}, settings=flag, dies=True)
        for name in names
    ]
    return {name: lives[0].log[1] for name, lives in zip(names, run_together(*jobs), strict=True)}


def test_a_gather_between_processes_on_cpus_keeps_to_the_limit_of_xla(ends):
    """A gather raises when another process comes later than xla_cpu_collective_timeout_seconds."""
    assert ends["all_gather"].startswith("UNKNOWN: Gloo AllGather failed")


def test_a_reduce_scatter_keeps_to_that_limit_since_jax_0_12(ends):
    """Since JAX 0.12 a reduce-scatter keeps to XLA's limit as well; before it had a limit of its own,
    30 s, which no flag changes (jax#40831)."""
    if jax.__version_info__ >= (0, 12):
        assert "Gloo ReduceScatter timed out" in ends["psum_scatter"]
    else:
        assert ends["psum_scatter"] == "they met"  # after eight seconds: less than 30
