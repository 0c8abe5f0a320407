"""What the rules cannot see in one execution: a translated notebook runs as it is.

That a second execution, without a network, shows the same is `bookkit offline`.
"""
import subprocess
import sys

import pytest

from rules import BOOK


@pytest.mark.parametrize("language", BOOK.languages[1:], ids=lambda language: language.code)
def test_a_translated_chapter_runs_as_it_is(language):
    """One here, all of them every night."""
    path = BOOK.notebook(BOOK.chapters[0], language)
    command = [sys.executable, "-m", "pytest", "-q", "--nbmake", "--nbmake-timeout=300", str(path)]
    done = subprocess.run(command, cwd=BOOK.root, capture_output=True, text=True)
    assert done.returncode == 0 and "1 of 1 notebooks passed" in done.stdout, done.stdout + done.stderr
