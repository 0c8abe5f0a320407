"""Drawings and tables are those that were looked at (gallery.py says how to change them)."""

import gallery
import pytest


@pytest.mark.parametrize("kind", ["drawings", "tables"])
def test_they_look_as_they_did(kind):
    """All at once: to make them is the work."""
    made = dict(gallery.files(kind))
    kept = {
        path.name
        for path in gallery.FOLDER.iterdir()
        if (".table." in path.name) == (kind == "tables")
    }
    assert made.keys() == kept
    changed = [
        name for name, text in made.items() if text != (gallery.FOLDER / name).read_text("utf-8")
    ]
    assert not changed
