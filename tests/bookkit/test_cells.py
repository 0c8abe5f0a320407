"""Running cells: what ends a job, what predictions are judged by, what is left behind."""

import os
import subprocess
import time

import pytest

import test_predictions
from bookkit.model.chapter import Cell, parse
from bookkit.run.cells import as_jobs, run_jobs
from toy import FRONT, code


def toy(*more):
    cells = (
        code("sizes = (2, 4)", "mesh"),
        code("rows = 16", "other"),
        code("predicted = rows // sizes[0]", "predict"),
    )
    return parse("99-bad", FRONT + "\n# A\n\n" + "\n\n".join([*cells, *more]) + "\n")


def only(chapter):
    [outcome] = run_jobs([as_jobs(chapter.code, id=7)])
    return outcome


def test_cells_run():
    assert only(toy())["failed"] is None
    assert only(toy(code("assert 1 > 2, 'no'")))["error"] == "AssertionError: no"
    assert only(toy(code("import os\nos._exit(3)")))["error"].startswith("CRASH")
    assert "DID NOT RAISE" in only(toy(code("x = 1", "raises-exception")))["error"]
    assert only(toy(code("1 / 0", "raises-exception")))["failed"] is None
    assert "NOT CORRECT" in only(toy(code("'not yet'", "solution-a")))["error"]


def test_cells_time_out():
    [outcome] = run_jobs([as_jobs(toy(code("while True: pass")).code, timeout=1)])
    assert outcome["error"].startswith("TIMEOUT") and outcome["failed"] == 5


def test_jobs_share_nothing():
    first = as_jobs([Cell(1, "code", "import sys\nsys.seen = 1")], id=1)
    second = as_jobs([Cell(1, "code", "import sys\nassert not hasattr(sys, 'seen')")], id=2)
    assert [outcome["error"] for outcome in run_jobs([first, second])] == [None, None]
    own = as_jobs(
        [Cell(1, "code", "import os\nassert 'JAX_PLATFORMS' not in os.environ")], fresh=True
    )
    assert [outcome["error"] for outcome in run_jobs([own])] == [None]


def test_a_job_that_does_not_fit_is_not_started():
    jobs = [as_jobs(toy().code, id=cost, cost=cost) for cost in (1, 500, 2)]
    assert [outcome["id"] for outcome in run_jobs(jobs, seconds=60)] == [1, 2]
    assert [outcome["id"] for outcome in run_jobs(jobs)] == [1, 500, 2]


def test_a_stopped_run_leaves_no_process():
    job = as_jobs(toy(code("while True: pass")).code, id="endless", timeout=60)
    quick = as_jobs(toy().code, id="quick")
    results = run_jobs([job, quick], parallel=2)
    assert next(results)["id"] == "quick"
    before = set(children_of_all())
    results.close()
    deadline = time.monotonic() + 10
    while set(children_of_all()) & before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert before and not set(children_of_all()) & before


def children_of_all():
    """Processes that run bookkit/run/cells.py for this test, forks included."""
    mine = subprocess.run(
        ["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True
    ).stdout
    table = [line.split(None, 2) for line in mine.splitlines()[1:]]
    servers = {
        pid
        for pid, parent, words in table
        if parent == str(os.getpid()) and "run/cells.py" in words
    }
    known = getattr(children_of_all, "known", set()) | servers
    known |= {pid for pid, parent, words in table if parent in known}
    children_of_all.known = known
    return known & {pid for pid, _, words in table if "run/cells.py" in words}


def test_only_predictions_that_say_so_run_again():
    chapter = toy(code("1", "predicted", "rerun"), code("2", "predicted"))
    assert test_predictions.last_predicted(chapter) == 5
    assert test_predictions.last_predicted(toy(code("1", "predicted"))) is None


@pytest.mark.parametrize(
    "source, said",
    [
        ("print(f'bytes: predicted {16 // sizes[0]} · measured {rows // sizes[0]}')", ""),
        (
            "print(f'predicted 8 bytes · measured {rows // sizes[0]} bytes')",
            "prints 'predicted 8 bytes · measured 4 bytes'",
        ),
        ("print(rows)", "prints 'nothing as predicted and measured'"),
        ("print(f'predicted 1 · measured 1', proven)", "fails: NameError"),
    ],
)
def test_predictions_see(source, said):
    """What is printed is compared, and proofs, which are about one mesh, do not run."""
    chapter = toy(
        code("assert sizes == (2, 4)\nproven = 1", "proof"), code(source, "predicted", "rerun")
    )
    found = test_predictions.failures([chapter])["99-bad"]
    assert len(found) == 2 * bool(said), found
    assert said in "\n".join(found)
