"""Each verb of bookkit explains itself, and a person's mistake is one sentence."""

import importlib
import subprocess
import sys

import pytest

from bookkit.__main__ import VERBS, main


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_explains_itself(verb, capsys):
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and said.startswith(f"usage: bookkit {verb}")
    assert importlib.import_module(f"bookkit.{VERBS[verb][0]}").__doc__


def test_a_mistake_of_a_person_is_one_sentence(tmp_path):
    command = [sys.executable, "-m", "bookkit", "execute"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("There is no book in")
    assert not done.stdout and len(done.stderr.splitlines()) == 1
    assert main([]) == 2 and main(["no-such-verb"]) == 2 and main(["--help"]) == 0
