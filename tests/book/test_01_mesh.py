"""Chapter 1, "A mesh is a grid of devices with names": the sum that moves, and the sum forgotten."""

import jax
import pytest

import meshscope as ms
from pages import compiled_for_cpu

PAGE = "01-mesh"


@compiled_for_cpu
def test_each_device_sends_twice_the_sum_but_its_own_piece(page):
    """For a sum of S bytes on n devices each device sends 2 S (n-1)/n bytes; S is the size of the sum,
    which all devices of a group along `model` have in the end."""
    (move,) = ms.collectives(page.compiled, page.mesh)
    n, piece = page.mesh.shape["model"], page.y_BD.addressable_shards[0].data
    assert move.axes == ("model",)
    assert move.wire_bytes == 2 * piece.nbytes * (n - 1) / n


def test_the_end_of_the_message_about_a_forgotten_sum_names_the_axis(page):
    """If you forget the sum, JAX notices, and the end of its message names the axis."""
    with pytest.raises(ValueError) as error:
        page.refused(page.h_BF, page.w_out_FD)
    beginning, *rest = str(error.value).split("\n\n")
    assert "out_specs which require replication" in beginning
    assert "model" in " ".join(rest) and "mesh axis" in " ".join(rest)


def test_a_product_of_blocks_is_wrong_until_the_partial_sums_are_added(page):
    """Until the partial sums are added, the result is wrong."""
    unchecked = jax.shard_map(
        page.without_the_sum,
        mesh=page.mesh,
        in_specs=page.in_specs,
        out_specs=page.out_specs,
        check_vma=False,
    )
    wrong, right = unchecked(page.h_BF, page.w_out_FD), page.dot_by_hand(page.h_BF, page.w_out_FD)
    assert abs(wrong - right).max() > 0.1
    assert abs(right - page.y_host).max() < 0.1
