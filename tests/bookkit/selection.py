"""What `make test` leaves out: tests that passed, and whose files are today what they were then.

A test depends on Python, on the code of the pages, on which files there are, and on every file that
git knows or could know and that is not prose (PROSE). Most read no prose, and a change of prose alone
leaves them out. A module depends on the files of prose that its tests were seen to open; on all of
them if one opened a page of the built site, or started a process in the repository, which could open
any. A module or a test may say better:

    pytest.mark.reads()                               none: what is started reads no prose
    pytest.mark.reads("book/*.md", "locale/")         these; a folder ends with /
    pytest.mark.reads("book/{path.stem}.md")          the page that the test was parametrised with
    pytest.mark.reads("headings")                     of all pages: where links may lead
    pytest.mark.reads("addresses")                    of other pages, in all prose: where links lead

So after a change of prose alone those tests run that could read what changed; after any other
change, everything. Passes are kept in _build/passed.json; a test that failed always runs again.

pytest-testmon decides by the lines of Python that ran: it knows nothing of Markdown, catalogues,
tables or what a subprocess read, and its tracing slows down what compiles for a living.
"""

import fnmatch
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

PROSE = ("book/*.md", "notebooks/*.ipynb", "notebooks/*/*.ipynb", "locale/", "*.md")
CODE = re.compile(r"(?ms)\A---\n.*?^---$|^(`{3,})\s*\{code-cell.*?^\1`*\s*$")
ADDRESS = re.compile(rb"https?://[^\s()<>\[\]\"'`\\]+")
HEADING = re.compile(r"(?m)^(?:#+ .*|\([\w-]+\)=)$")


def matches(name, pattern):
    """Is this file of the repository meant? A * stands for no slash."""
    if pattern.endswith("/"):
        return name.startswith(pattern)
    return name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern)


def is_prose(name):
    return any(matches(name, pattern) for pattern in PROSE)


def names_of_files(root):
    """What git knows, and what it would take; all outside _build and .venv where there is no git."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode == 0:
        return sorted({name for name in done.stdout.split("\0") if (root / name).is_file()})
    every = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in every
                  if not path.parts[0].startswith((".venv", ".git")) and "__pycache__" not in path.parts
                  and path.parts[0] != "_build")


def sha256(content):
    return hashlib.sha256(content).hexdigest()


class Files:
    """The repository as it is when this is made: whoever edits while tests run runs them again."""

    def __init__(self, root):
        contents = {name: (root / name).read_bytes() for name in names_of_files(root)}
        self.prose = {name: sha256(content) for name, content in contents.items() if is_prose(name)}
        pages = {name: contents[name].decode() for name in contents if matches(name, "book/*.md")}
        cells = {name: [found[0] for found in CODE.finditer(text)] for name, text in pages.items()}
        others = {name: sha256(content) for name, content in contents.items() if name not in self.prose}
        names = sorted(self.prose)
        # What every test depends on:
        self.code = sha256(repr((sys.version, cells, others, names)).encode())
        self.addresses = repr([(name, sorted(set(ADDRESS.findall(contents[name])))) for name in sorted(self.prose)])
        self.headings = repr({name: HEADING.findall(text) for name, text in pages.items()})

    @functools.cache  # noqa: B019 (one object a session)
    def digest(self, reads):
        """Of all that a test depends on which reads this prose."""
        found = {pattern: [(name, one) for name, one in self.prose.items() if matches(name, pattern)]
                 for pattern in reads}  # fmt: skip
        headings = "headings" in reads and self.headings
        addresses = "addresses" in reads and self.addresses
        return sha256(repr((self.code, found, headings, addresses)).encode())[:16]


def said_to_read(item):
    """The patterns of a test's marks, with its parameters filled in; None without a mark."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    marks = list(item.iter_markers("reads"))
    if not marks:
        return None
    return tuple(pattern.format(**parameters) for mark in marks for pattern in mark.args)


class Passed:
    """The tests that passed, with what they depended on then; and what each module was seen to read."""

    def __init__(self, path):
        self.path = path
        try:
            kept = json.loads(path.read_text("utf-8"))
            self.digests = kept["passed"]
            self.readers = {module: set(names) for module, names in kept["readers"].items()}
        except (FileNotFoundError, ValueError, KeyError, AttributeError):  # never run, or by other code
            self.digests, self.readers = {}, {}

    def reads(self, name, said):
        """What a test is taken to read: what it says, else what its module was seen to."""
        return tuple(sorted(self.readers.get(name.split("::")[0], ()))) if said is None else said

    def note(self, name, digest):
        """A digest for a test that passed, None for one that did not."""
        if digest is None:
            self.digests.pop(name, None)
        else:
            self.digests[name] = digest

    def save(self):
        self.path.parent.mkdir(exist_ok=True)
        new = self.path.with_suffix(".new")
        readers = {module: sorted(names) for module, names in self.readers.items() if names}
        kept = {"readers": readers, "passed": self.digests}
        new.write_text(json.dumps(kept, indent=0, sort_keys=True) + "\n", "utf-8")
        new.replace(self.path)


def opened_prose(event, arguments, root):
    """The prose that is read, or could be, in this event of Python's (sys.addaudithook): patterns."""
    if event == "open":
        name = as_name(arguments[0], root) if isinstance(arguments[0], (str, os.PathLike)) else None
        if name is not None and name.startswith("_build/html"):  # made of all of it
            return PROSE
        return (name,) if name is not None and is_prose(name) else ()
    if event == "subprocess.Popen":  # in the repository's folder, or below it where something is built
        folder = as_name(arguments[2] or os.getcwd(), root)
        return PROSE if folder is not None and not folder.startswith("_build") else ()
    return ()


def as_name(path, root):
    """A file as the repository calls it, or None if it is not in there."""
    try:
        return Path(path).resolve().relative_to(root).as_posix()
    except (ValueError, OSError, TypeError):
        return None
