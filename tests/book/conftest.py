"""For the tests of the book's pages: eight devices, a cache of compiled programs, and the page."""

import gc
import os
from pathlib import Path

import pytest

import many_devices

if os.environ.get("BOOK_DEVICES") != "real":
    # The same HLO, so the same shardings, collectives and memory; LLVM's part takes half as long.
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
many_devices.setup()  # before anything uses JAX

import jax  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

from pages import run, tables  # noqa: E402

# The book's site has no such cache: its key leaves out source lines, and the site prints them.
CACHE = Path(__file__).parents[2] / "_build" / "compiled-for-tests"
CACHED = {
    "jax_compilation_cache_dir": str(CACHE),
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": 0,
}


def pytest_addoption(parser):
    parser.addoption(
        "--page",
        choices=list(tables()),
        metavar="PAGE",
        help="plant only the faults of this page (test_faults.py)",
    )


def configure(settings):
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module", autouse=True)
def compiled_once():
    """The cache is for these tests alone: others in this process read source lines."""
    before = {name: getattr(jax.config, name) for name in CACHED}
    configure(CACHED)
    yield
    gc.collect()  # a page's functions and variables refer to each other
    jax.clear_caches()  # a process of Linux has room for 65,530 mappings
    configure(before)


@pytest.fixture(scope="module")
def page(request, compiled_once):
    """The page that this module names in PAGE, executed once for all of its tests."""
    with run(request.module.PAGE) as executed:
        yield executed


@pytest.fixture
def explicit_row():
    """A mesh of eight devices along `data` in Explicit mode, set while a test runs."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        yield mesh
