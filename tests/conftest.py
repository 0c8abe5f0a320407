"""`make test` leaves out what a change cannot touch; plain `pytest` leaves nothing out.

How that is decided stands in tests/bookkit/selection.py.
"""

import functools
import sys
from pathlib import Path

import pytest

import selection

ROOT = Path(__file__).resolve().parents[1]
# A file runs in one process, so these begin first: none of them is left over at the end, alone.
LONGEST = (
    "tests/examples/test_train.py",  # six minutes, the next two
    "tests/browser/test_pages.py",
    "tests/bookkit/test_publish_as.py",
    "tests/book/test_launch_helper.py",
    "tests/bookkit/test_build_site.py",
    "tests/bookkit/test_served_wheel.py",
    "tests/examples/test_launch.py",
)
files = selection.Files(ROOT)
passed = selection.Passed(ROOT / "_build" / "passed.json")
seen = set()  # the prose that the test which runs opened, or could have
imported = {}  # by module: what was opened when it was imported
ran = {}  # by test: whether it passed, what it says that it reads, what it was seen to read
left_out = 0


def see_what_is_opened(event, arguments):
    if event in ("open", "subprocess.Popen") and not seen.issuperset(selection.PROSE):
        seen.update(selection.opened_prose(event, arguments, ROOT))


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
    seen.clear()
    outcome = yield
    if nextitem is None or nextitem.path != item.path:
        forget()
    return outcome


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    if not isinstance(collector, pytest.Module):
        return (yield)
    forget()
    seen.clear()
    report = yield
    imported[collector.path] = set(seen)
    return report


def forget():
    """Empty all caches, so that the next module opens its files itself, and is seen to."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if name.startswith("bookkit.") or file.startswith(f"{ROOT}/tests/"):
            for kept in list(vars(module).values()):
                if isinstance(kept, functools._lru_cache_wrapper):
                    kept.cache_clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    opened = sorted(seen | imported.get(item.path, set()))
    report.user_properties.append(("reads", [selection.said_to_read(item), opened]))
    return report


def pytest_runtest_logreport(report):
    reads = dict(report.user_properties).get("reads")
    if reads:
        said, was_seen = reads
        before = ran.get(report.nodeid, (False, None, set()))
        ok = report.passed if report.when == "call" else before[0] and report.passed
        ran[report.nodeid] = (ok, said, before[2] | set(was_seen))


def pytest_sessionfinish(session, exitstatus):
    config = session.config
    if hasattr(config, "workerinput") or config.option.collectonly:
        return
    if not config.option.changed:
        for name in ran:
            passed.readers.pop(name.split("::")[0], None)  # seen anew
    for name, (_, said, was_seen) in ran.items():
        if said is None:
            passed.readers.setdefault(name.split("::")[0], set()).update(was_seen)
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
