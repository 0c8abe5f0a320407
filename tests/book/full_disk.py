"""For tests of checkpoints: a disk with hardly any room, and Orbax without its log."""

import contextlib
import logging
import resource
import warnings

import pytest


@contextlib.contextmanager
def nearly_full_disk(room=4096):
    """Writes beyond so many bytes of a file fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(autouse=True)
def quiet_orbax(monkeypatch):
    """Silence Orbax's log, its warnings, and coroutines of failed saves and loads."""
    logging.disable()
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited")
        warnings.filterwarnings("ignore", "Sharding info not provided")
        yield
    logging.disable(logging.NOTSET)
