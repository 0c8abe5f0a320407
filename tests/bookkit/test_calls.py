"""A chapter with a reader's calls: what is asked, what is judged, what is kept of it and what is published."""

import shutil

import pytest

import test_exercises
from bookkit.model.book import Book
from bookkit.run import calls, execute
from bookkit.run.execute import read_as_sphinx
from toy import FRONT, ROOT, code

PAGE = "book/99-bad"
CHECKS = {  # by exercise: what its check does, and what is said of it
    "kind": ("return 'correct'", 'to the stub, not "not yet'),
    "strict": ("return 'not yet'", "'not yet' to the solution, not \"correct"),
    "lax": ("return 'correct' if answer else 'not yet'", 'to the wrong answer, not "not yet'),
    "raising": ("return 'correct' if answer + 0 == 1 else 'not yet'", "raised TypeError"),
    "good": ("return 'correct' if answer == 1 else 'not yet'", None),
}


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    root = tmp_path_factory.mktemp("calls")
    cells = [code("shown = 3\nprint(shown)")]
    for name, (body, _) in CHECKS.items():
        cells += [
            code(f"answer_{name} = None", f"exercise-{name}"),
            code(f"def check_{name}(answer):\n    {body}", f"check-{name}"),
            code(f"answer_{name} = 1", f"solution-{name}"),
        ]
    (root / "book").mkdir()
    (root / "tests" / "pages").mkdir(parents=True)
    (root / f"{PAGE}.md").write_text(
        FRONT + "\n# A\n\n" + "\n\nWords.\n\n".join([*cells, code("print(shown + 1)")]) + "\n"
    )
    (root / "tests" / "pages" / "99-bad.toml").write_text(
        "\n".join(f'[exercise.{name}]\nwrong = "answer_{name} = 2"\nwhy = "two"' for name in CHECKS)
    )
    (root / "_toc.yml").write_text(f"format: jb-book\nroot: {PAGE}\n")
    shutil.copyfile(ROOT / "_config.yml", root / "_config.yml")
    return Book(root)


@pytest.fixture(scope="module")
def executed(book):
    return execute.executed_with_calls(book, [PAGE])[PAGE]


def test_checks_that_answer_wrongly_are_seen(book, executed):
    said = list(test_exercises.judge(PAGE, executed, calls.wrong_answers(book, PAGE)))
    for name, (_, piece) in CHECKS.items():
        about = [line for line in said if f"exercise {name}:" in line]
        assert piece in "\n".join(about) if piece else about == [], (name, said)
    assert len([what for what, *_ in calls.answers(executed)]) == 3 * len(CHECKS) + 1


def test_a_wrong_answer_to_no_exercise_is_seen(executed):
    [said] = [line for line in test_exercises.judge(PAGE, executed, {"gone": {}}) if "gone" in line]
    assert "not there" in said


def test_a_page_has_its_answers_in_its_own_table(book):
    assert set(calls.wrong_answers(book, PAGE)) == set(CHECKS)
    assert calls.wrong_answers(book, PAGE)["good"]["why"] == "two"
    assert calls.wrong_answers(book, "book/98-none") == {}


def test_without_its_calls_a_chapter_is_what_it_was(book, executed):
    own, shown = read_as_sphinx(book, PAGE), calls.without_calls(executed)
    assert [cell.source for cell in shown.cells] == [cell.source for cell in own.cells]
    assert shown.cells[1].outputs[0].text == "3\n" and shown.cells[-1].outputs[0].text == "4\n"
    made = calls.with_calls(book, PAGE, read_as_sphinx(book, PAGE))
    assert len(made.metadata["source_map"]) == len(made.cells) > len(own.cells)


def test_what_a_chapter_loaded_is_told(executed):
    [(_, _, packages)] = [one for one in calls.answers(executed) if one[0] == calls.LOADED_PACKAGES]
    assert "'sys'" in packages and "'flax'" not in packages


def test_a_wrong_answer_that_does_not_run_is_a_failing_cell(book):
    notebook = calls.with_calls(book, PAGE, read_as_sphinx(book, PAGE))
    [broken] = [cell for cell in notebook.cells if cell.source == "answer_good = 2"]
    broken["source"] = "answer_good = ("
    with pytest.raises(execute.ExecutionFailed, match="SyntaxError"):
        execute.execute_notebooks(book, {PAGE: notebook}, say=lambda _: None)


def test_the_calls_run_with_the_chapter_and_are_not_published(book, monkeypatch):
    published = execute.execute(book, [PAGE])[PAGE]
    assert not [cell for cell in published.cells if calls.CALL in cell.metadata]
    monkeypatch.setattr(execute, "execute_all", lambda *_: pytest.fail("executed again"))
    assert (
        len(list(calls.answers(execute.executed_with_calls(book, [PAGE])[PAGE])))
        == 3 * len(CHECKS) + 1
    )


def test_a_cell_that_fails_is_counted_without_calls(book, tmp_path):
    shutil.copytree(book.root, tmp_path, dirs_exist_ok=True)
    page = tmp_path / f"{PAGE}.md"
    page.write_text(page.read_text() + "\n" + code("1 / 0") + "\n")
    with pytest.raises(execute.ExecutionFailed) as failed:
        execute.execute(Book(tmp_path), [PAGE], say=lambda _: None)
    assert failed.value.failures[0].cell == len(read_as_sphinx(Book(tmp_path), PAGE).cells)


def test_the_seconds_of_cells_are_kept(book):
    seconds = execute.seconds_of_cells(book, PAGE)
    numbers = [
        n for n, cell in enumerate(read_as_sphinx(book, PAGE).cells, 1) if cell.cell_type == "code"
    ]
    assert sorted(seconds) == numbers and all(taken >= 0 for taken in seconds.values())
