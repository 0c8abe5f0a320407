"""Drawings and tables are those that were looked at (gallery.py says how to change them)."""

import gallery
import pytest


@pytest.fixture(scope="module")
def made():
    return dict(gallery.files())


def test_every_file_is_made():
    kept = {path.name for path in gallery.FOLDER.iterdir()}
    assert kept == set(dict(gallery.files()))


@pytest.mark.parametrize("name", sorted(path.name for path in gallery.FOLDER.iterdir()))
def test_it_looks_as_it_did(name, made):
    assert made[name] == (gallery.FOLDER / name).read_text("utf-8")
