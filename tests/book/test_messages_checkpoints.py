"""Messages about checkpoints: the program raises what its heading quotes, and the fix is right."""

import jax
import numpy as np
import pytest

from printed import assert_raised, run_and_read, said

PAGE = "messages-checkpoints"

RAISED = {
    "keys": [
        "Cannot interpret 'key<fry>' as a data type",
        "JAX array with PRNGKey dtype cannot be converted to a NumPy array",
    ]
}


@pytest.fixture(scope="module")
def page():
    """The page, executed once."""
    with run_and_read(PAGE) as executed:
        yield executed
    jax.clear_caches()


@pytest.mark.parametrize("slug", RAISED)
def test_the_program_raises_what_its_heading_quotes(page, slug):
    """The first cell of the entry prints each piece of a message that stands in its heading."""
    assert_raised(page, slug, RAISED[slug])


def test_a_key_comes_back_from_orbax_and_from_its_numbers(page):
    """Saved and loaded, or taken apart and wrapped, it draws the same numbers."""
    drawn = jax.random.normal(page.key, (4,))
    for key in (page.loaded_key, page.wrapped_key):
        assert key.dtype == page.key.dtype
        np.testing.assert_array_equal(jax.random.normal(key, (4,)), drawn)
    np.testing.assert_array_equal(page.key_numbers, [0, 7])


def test_what_the_text_names_raises_the_messages(page, tmp_path):
    """Bytes by NumPy's dtype raise the first, np.savez and flax.serialization the second."""
    import flax.serialization

    first, second = RAISED["keys"]
    assert first in said(lambda: np.dtype(page.key.dtype).itemsize)
    assert second in said(lambda: np.savez(tmp_path / "keys.npz", key=page.key))
    assert second in said(flax.serialization.to_bytes, {"key": page.key})
