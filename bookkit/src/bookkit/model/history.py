"""When each file last changed, as git knows it."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path


@functools.cache
def last_changes(root: Path) -> dict[str, str]:
    """The time of the last commit of each file, by its path from the root; nothing without a history.

    A shallow clone would say that everything changed with its oldest commit, so it says nothing.
    """
    shallow = ["git", "rev-parse", "--is-shallow-repository"]
    log = ["git", "log", "--format=%x00%cI", "--name-only", "--relative", "--no-renames"]
    try:
        if answer(shallow, root) != "false":
            return {}
        commits = answer(log, root).split("\0")[1:]
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        return {}
    changes: dict[str, str] = {}
    for commit in commits:  # the newest first
        when, *files = commit.split("\n")
        for file in filter(None, files):
            changes.setdefault(file, when)
    return changes


def answer(command: list[str], folder: Path) -> str:
    """What a command prints there; CalledProcessError where it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", check=True)
    return done.stdout.strip()
