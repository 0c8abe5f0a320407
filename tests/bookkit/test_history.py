"""When a page last changed, as git knows it."""

import os
import subprocess

from bookkit.model.history import last_changes


def commit(folder, file, day):
    (folder / file).write_text(day)
    when = f"{day}T12:00:00+00:00"
    about = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "add", file], cwd=folder, check=True)
    command = ["git", *about, "commit", "-q", "-m", file, "--date", when]
    subprocess.run(command, cwd=folder, check=True, env=os.environ | {"GIT_COMMITTER_DATE": when})


def test_the_last_commit_of_a_file_counts_and_a_shallow_clone_says_nothing(tmp_path):
    whole, shallow, none = (tmp_path / name for name in ("whole", "shallow", "none"))
    whole.mkdir()
    none.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=whole, check=True)
    for file, day in (("a.md", "2026-01-02"), ("b.md", "2026-01-03"), ("a.md", "2026-01-04")):
        commit(whole, file, day)
    clone = ["git", "clone", "-q", "--depth", "1", f"file://{whole}", str(shallow)]
    subprocess.run(clone, check=True)
    days = {file: when[:10] for file, when in last_changes(whole).items()}
    assert days == {"a.md": "2026-01-04", "b.md": "2026-01-03"}
    assert last_changes(shallow) == {}
    assert last_changes(none) == {}
