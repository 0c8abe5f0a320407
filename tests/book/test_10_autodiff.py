"""Chapter 10, "Autodiff and communication: every collective has a partner"."""

import re

import jax
import pytest

import meshscope as ms
from layers_of_fsdp import LAYERS, REMATS, D, gradient_of_stack
from pages import BOOK, compiled_for_cpu

PAGE = "10-autodiff"
P = jax.P
N = 8
OPERATIONS = ["psum", "all_gather", "psum_scatter", "all_to_all", "ppermute"]


def formula_of(operation):
    """What the table of the page says that an operation sends, as a function of S and n."""
    text = (BOOK / f"{PAGE}.md").read_text()
    (cells,) = re.findall(rf"^\| `{operation}` \|(.*)\|$", text, re.MULTILINE)
    latex = cells.split("|")[1].strip().strip("$")
    python = re.sub(r"(?<=[\dSn)])(?=[S(])", "*", latex)  # 2S(n-1) is a product
    return lambda S, n: eval(python, {}, {"S": S, "n": n})


def size_of_the_whole(operation, table):
    """S: what is gathered, summed or moved, all devices' pieces together."""
    is_sum = operation in ("psum", "psum_scatter")  # a term, on one device, is as large as the sum
    return table.nbytes // N if is_sum else table.nbytes


@compiled_for_cpu
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_table_says_what_a_device_sends_of_a_whole_array_of_s_bytes(page, operation):
    """all_gather and psum_scatter send S(n-1)/n, psum 2S(n-1)/n, all_to_all (S/n)(n-1)/n and ppermute
    S/n, where S is the size of the whole array."""
    out = P() if operation == "psum" else P("data")
    mapped = jax.shard_map(page.moves[operation], mesh=page.mesh, in_specs=P("data"), out_specs=out)
    (move,) = ms.collectives(jax.jit(mapped).lower(page.table).compile(), page.mesh)
    S = size_of_the_whole(operation, page.table)
    assert formula_of(operation)(S, N) == move.wire_bytes > 0


@compiled_for_cpu
def test_a_gather_and_the_scatter_that_is_its_partner_send_the_same(page):
    """Forward and backward, a gather and its scatter send the same bytes."""

    def there_and_back(x_block):
        y, backward = jax.vjp(page.moves["all_gather"], x_block)
        return backward(y)[0]

    mapped = jax.shard_map(there_and_back, mesh=page.mesh, in_specs=P("data"), out_specs=P("data"))
    moves = ms.collectives(jax.jit(mapped).lower(page.table).compile(), page.mesh)
    sizes = {move.kind: move.wire_bytes for move in moves}
    assert sizes["all-gather"] == sizes["reduce-scatter"] and len(sizes) == 2


@compiled_for_cpu
@pytest.mark.parametrize("remat, passes", [("kept", 1), ("jax.checkpoint", 2)])
def test_inside_checkpoint_fsdp_sends_twice_as_much_backward_as_forward(remat, passes):
    """A layer of FSDP sends as much backward as forward, inside jax.checkpoint twice as much."""
    gradient, inputs = gradient_of_stack(REMATS[remat])
    moves = ms.collectives(jax.jit(gradient).lower(*inputs).compile())
    per_pass = 4 * LAYERS * D * D * (N - 1) / N
    kinds = {"all-gather", "reduce-scatter"}
    sent = sum(move.wire_bytes * move.executions for move in moves if move.kind in kinds)
    assert sent == (1 + passes) * per_pass
