"""Figures are what their programs draw."""

import pytest

from bookkit.model.book import Problem
from bookkit.site import figures

KIT = "SIZE = 9\n"
PROGRAM = """from kit import SIZE


def draw():
    return {"one": f"<svg>{SIZE}</svg>", "two": "<svg/>"}
"""


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "book" / "figures"
    folder.mkdir(parents=True)
    (tmp_path / "_config.yml").touch()
    (tmp_path / "_toc.yml").touch()
    (folder / "kit.py").write_text(KIT)  # draws nothing
    (folder / "pair.py").write_text(PROGRAM)
    figures.main([], tmp_path)
    assert (folder / "one.svg").read_text() == "<svg>9</svg>"
    assert not list(tmp_path.rglob("__pycache__"))
    return tmp_path


def test_what_changed_is_drawn_and_nothing_else(root, capsys):
    (root / "book" / "figures" / "kit.py").write_text("SIZE = 8\n")
    with pytest.raises(Problem, match=r"Not what their programs draw: one\.svg\. Run"):
        figures.main(["--check"], root)
    figures.main([], root)
    figures.main(["--check"], root)
    assert capsys.readouterr().out.endswith("drew one.svg\nall figures are up to date\n")


def test_a_drawing_edited_by_hand_is_noticed(root):
    (root / "book" / "figures" / "two.svg").write_text("<svg>mine</svg>")
    with pytest.raises(Problem, match=r"two\.svg"):
        figures.main(["--check"], root)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("orphan.svg", "<svg/>", r"no program there draws orphan\.svg"),
        (
            "broken.py",
            "def draw():\n    raise ValueError('no ink')\n",
            r"A figure was not drawn:(.|\n)*broken\.py(.|\n)*no ink",
        ),
    ],
)
def test_what_is_wrong_with_a_program_is_named(root, name, text, said):
    (root / "book" / "figures" / name).write_text(text)
    with pytest.raises(Problem, match=said):
        figures.main([], root)
