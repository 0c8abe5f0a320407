"""`make test` leaves out what a change cannot touch; plain `pytest` leaves nothing out.

How that is decided stands in tests/bookkit/selection.py.
"""

import sys
from pathlib import Path

import pytest

import selection
from bookkit.model.chapter import load_chapter

ROOT = Path(__file__).resolve().parents[1]
# A file runs in one process, so these begin first: none of them is left over at the end, alone.
LONGEST = (
    "tests/examples/test_train.py",  # six minutes, the next two
    "tests/browser/test_pages.py",
    "tests/bookkit/test_third_language.py",
    "tests/bookkit/test_publish_as.py",
    "tests/book/test_launch_helper.py",
    "tests/bookkit/test_build_site.py",
    "tests/bookkit/test_served_wheel.py",
    "tests/examples/test_launch.py",
)
files = selection.Files(ROOT)
passed = selection.Passed(ROOT / "_build" / "passed.json")
seen = False  # did the test that runs open prose?
ran = {}  # by test: whether it passed, what it says that it reads, whether it was seen to read
left_out = 0


def see_what_is_opened(event, arguments):
    global seen
    if event in ("open", "subprocess.Popen") and not seen:
        seen = selection.opens_prose(event, arguments, ROOT)


def pytest_addoption(parser):
    about = "leave out tests that passed, and whose files are what they were then"
    parser.addoption("--changed", action="store_true", help=about)


def pytest_configure(config):
    about = "reads(*patterns): the prose that a test depends on (tests/bookkit/selection.py)"
    config.addinivalue_line("markers", about)
    sys.addaudithook(see_what_is_opened)


def pytest_collection_modifyitems(config, items):
    global left_out
    ranks = {file: rank for rank, file in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.nodeid.split("::")[0], len(ranks)))
    if not config.option.changed:
        return
    kept, others = [], []
    for item in items:
        reads = passed.reads(item.nodeid, selection.said_to_read(item))
        unchanged = passed.digests.get(item.nodeid) == files.digest(reads)
        (others if unchanged else kept).append(item)
    if others:
        items[:] = kept
        config.hook.pytest_deselected(items=others)
    left_out = len(others)
    if hasattr(config, "workeroutput"):  # a worker of pytest-xdist, which tells the one that asked
        config.workeroutput["left out"] = left_out


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    global left_out
    left_out = getattr(node, "workeroutput", {}).get("left out", left_out)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    global seen
    seen = False
    outcome = yield
    if nextitem is None or nextitem.path != item.path:
        load_chapter.cache_clear()  # the next module opens its pages itself, and is seen to
    return outcome


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.user_properties.append(("reads", [selection.said_to_read(item), seen]))
    return report


def pytest_runtest_logreport(report):
    reads = dict(report.user_properties).get("reads")
    if reads:
        said, was_seen = reads
        before = ran.get(report.nodeid, (False, None, False))
        ok = report.passed if report.when == "call" else before[0] and report.passed
        ran[report.nodeid] = (ok, said, before[2] or was_seen)


def pytest_sessionfinish(session, exitstatus):
    config = session.config
    if hasattr(config, "workerinput") or config.option.collectonly:
        return
    modules = {name.split("::")[0] for name in ran}
    if not config.option.changed:
        passed.readers -= modules  # seen anew
    passed.readers |= {name.split("::")[0] for name, (_, said, was_seen) in ran.items()
                       if was_seen and said is None}  # fmt: skip
    for name, (ok, said, _) in ran.items():
        reads = passed.reads(name, None if said is None else tuple(said))
        passed.note(name, files.digest(reads) if ok else None)
    passed.save()
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and left_out:
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter):
    if left_out:
        terminalreporter.write_line(
            f"{left_out} tests passed before, with the files they depend on: left out "
            "(`make test ALL=yes` runs every test)"
        )
