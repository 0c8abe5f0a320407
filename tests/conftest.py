"""The longest test modules begin first: a module runs in one process, and none is left at the end."""

LONGEST = (
    "tests/examples/test_train.py",
    "tests/browser/test_pages.py",
    "tests/book/test_launch_helper.py",
    "tests/bookkit/test_build_site.py",
    "tests/examples/test_launch.py",
)


def pytest_collection_modifyitems(items):
    ranks = {file: rank for rank, file in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.nodeid.split("::")[0], len(ranks)))
