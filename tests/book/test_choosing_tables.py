"""The page "Choosing a table for your model"."""

import pytest

from many_devices.compiled import stored_program
from many_devices.logical import large

IMAGES = 64  # of the stored programs
TOKENS_OF_AN_IMAGE = 16


def sent(name, compiler):
    return sum(row["wire"] for row in stored_program(name)[compiler]["moves"])


@pytest.mark.parametrize("compiler, widths", [("gpu", "4.5"), ("tpu", "3.0"), ("cpu", "4.0")])
def test_tensor_parallelism_sends_less_up_to_so_many_tokens(compiler, widths):
    """By bytes, tensor parallelism sends less than pinned FSDP below 4.5 D tokens on H100, 3 D on TPU
    v5e and 4 D on CPU: FSDP sends the same at any batch, tensor parallelism in proportion to it."""
    times = sent("names-pinned", compiler) / sent("names-few", compiler)
    tokens = times * IMAGES * TOKENS_OF_AN_IMAGE
    assert f"{tokens / large.D:.1f}" == widths


@pytest.mark.parametrize("compiler", ["cpu", "gpu"])
def test_what_pinned_fsdp_sends_does_not_grow_with_the_batch(compiler):
    """At eight times the batch, pinned FSDP sends the same bytes, within a thousandth."""
    few, many = sent("names-pinned", compiler), sent("names-pinned-512", compiler)
    assert many == pytest.approx(few, rel=1e-3)


def test_what_tensor_parallelism_sends_grows_with_the_batch():
    """At twice the batch, tensor parallelism sends twice the bytes (of the small model)."""
    for compiler in ("cpu", "tpu", "gpu"):
        ratio = sent("names-tensor-64", compiler) / sent("names-tensor", compiler)
        assert ratio == pytest.approx(2, rel=0.02)
