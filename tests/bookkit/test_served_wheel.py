"""The wheels that the site serves are those that its notebooks ask for, or it is not built.

How they are built and installed is tested in tests/companion/test_wheels.py.
"""

import pytest

from bookkit.model.book import Problem
from bookkit.model.package import CELL, COMPANION, Wheel, build_wheel, with_cell_hash
from bookkit.site.build import serve_wheels
from toy import ROOT


@pytest.fixture(scope="module")
def wheels():
    return build_wheel(ROOT), build_wheel(ROOT, COMPANION)


def site_for(folder, wheel):
    """A site with one notebook, which asks for this wheel."""
    cell = with_cell_hash((ROOT / CELL).read_text("utf-8"), wheel)
    (folder / "notebooks").mkdir()
    (folder / "notebooks" / "01-mesh.ipynb").write_text(cell, "utf-8")
    return folder


def test_both_lie_where_notebooks_look_for_them(wheels, tmp_path):
    serve_wheels(wheels, site_for(tmp_path, wheels[1]))
    for wheel in wheels:
        assert (tmp_path / wheel.path).read_bytes() == wheel.data


def test_a_notebook_that_asks_for_another_is_named(wheels, tmp_path):
    other = Wheel(wheels[1].name, b"other")
    with pytest.raises(Problem, match=r"(?s)01-mesh\.ipynb pins many_devices .* run `make sync`"):
        serve_wheels(wheels, site_for(tmp_path, other))
