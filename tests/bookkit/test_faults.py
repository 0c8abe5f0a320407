"""Planted faults: what becomes of one, which entries do not fit, how the command ends."""

import pytest

from bookkit.lint import faults
from bookkit.model.book import Problem
from bookkit.model.chapter import parse
from bookkit.run.cells import run_jobs
from toy import FRONT, code

FAULTY = parse(
    "99-bad",
    FRONT
    + "\n# A\n\n"
    + "\n\n".join(
        [
            code("sizes = (2, 4)", "id-sizes"),
            *map(code, ["rows = 16", "predicted = rows // sizes[0]", "shown = predicted"]),
            code("assert predicted == 8", "proof", "id-eight"),
            code("assert rows < 20", "proof", "id-few"),
        ]
    )
    + "\n",
)


def fault(**changes):
    return {
        "chapter": "99-bad",
        "rows": ["A2"],
        "name": "halved",
        "find": "rows = 16",
        "replace": "rows = 8",
        "fails": "eight",
        **changes,
    }


@pytest.mark.parametrize(
    "changes, word",
    [
        ({}, "killed"),
        ({"replace": "rows = 17"}, "SURVIVED"),
        ({"replace": "rows = 17", "survives": "17 // 2 is 8"}, "survives"),
        ({"survives": "no"}, "NOTICED"),
        ({"fails": "few"}, "ELSEWHERE"),
        ({"replace": "rows = sixteen"}, "BROKEN"),
        ({"find": "shown = predicted", "replace": "while True: pass"}, "HUNG"),
    ],
)
def test_verdicts(changes, word):
    entry = fault(**changes)
    changed, source, target = faults.fit_to_chapter(entry, FAULTY)
    seconds = 1 if word == "HUNG" else 20
    [outcome] = run_jobs([faults.job_with_fault(1, FAULTY, changed, source, target.index, seconds)])
    assert faults.verdict(entry, target, outcome)[0] == word


@pytest.mark.parametrize(
    "changes, piece",
    [
        ({"find": "rows"}, "times"),
        ({"find": "none"}, "0 times"),
        ({"fails": "none"}, "id-none, a tag that no cell"),
        ({"replace": "rows = 16"}, "the same"),
        ({"replace": "rows = ("}, "not Python"),
        ({"replace": "rows = 8\nrows = 9"}, "one line"),
        ({"fails": "sizes"}, "stands before"),
        ({"rows": ["Z9"]}, "no row Z9"),
        ({"chapter": "none"}, "no such chapter"),
        ({}, ""),
    ],
)
def test_misfits_are_seen(changes, piece):
    messages = list(faults.unfit_faults([fault(**changes)], {"99-bad": FAULTY}, {"A2"}))
    assert piece in messages[0] if piece else not messages
    twice = "\n".join(
        faults.unfit_faults([fault(), fault(), fault(name="other")], {"99-bad": FAULTY})
    )
    assert (
        "two faults are called" in twice and "other plants the same mistake as 99-bad / " in twice
    )


@pytest.mark.parametrize("lacks", ["rows", "find", "replace"])
def test_what_an_entry_lacks_is_named(lacks):
    entry = {key: value for key, value in fault().items() if key != lacks}
    [message] = faults.unfit_faults([entry], {"99-bad": FAULTY}, {"A2"})
    assert f"no `{lacks}`, {faults.FIELDS[lacks]}" in message


def test_the_command_ends_with_one(monkeypatch, capsys):
    monkeypatch.setattr(faults, "by_name", lambda root: {"99-bad": FAULTY})
    for entry, status in ((fault(), 0), (fault(replace="rows = 17"), 1), (fault(find="none"), 1)):
        monkeypatch.setattr(faults, "listed_faults", lambda book, entry=entry: [entry])
        assert faults.main([]) == status
    assert "To mend" in capsys.readouterr().out
    monkeypatch.setattr(
        faults,
        "seconds_stored",
        lambda book, chapters: {"99-bad": {cell.index: 0.1 for cell in FAULTY.code}},
    )
    both = [fault(), fault(name="other", replace="rows = 17")]
    monkeypatch.setattr(faults, "listed_faults", lambda book: both)
    assert faults.main(["--seconds", "60", "--seed", "3"]) == 1
    assert "seed 3: 2 of 2 faults" in capsys.readouterr().out
    assert faults.main(["--seconds", "0.1", "--seed", "3"]) == 1  # each would cost 0.5 s and more
    assert "no fault fits into 0 s" in capsys.readouterr().out
    assert faults.main(["--list"]) == 0 and faults.main(["--name", "halved"]) == 0
    with pytest.raises(Problem, match="No pages with code: 98-none"):
        faults.main(["--page", "98-none"])
