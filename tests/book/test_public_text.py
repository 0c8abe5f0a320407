"""Committed text is finished and says nothing about one person's machine."""
import re
import subprocess

from rules import BOOK, verify

WORDS = "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3, "TB" + "D"])
FORBIDDEN = {
    rf"\b(?:{WORDS})\b": "is unfinished: do it, or open an issue",
    r"(?i)lorem\s+ip" "sum": "is filler: write the text",
    r"(?<![\w.:/-])/(?:home/\w+|root|Users/\w+|wo" r"rk|mnt|tmp/\w+)(?:/|\b)":
        "is a path of one machine: make it relative",
    r"<{7} |>{7} |^={7}$": "is left of a merge: resolve it",
    r"\b(?:127\.0\.0\.1|localhost):(?!8000|\{)\d+": "is an address on one machine",
}
ABOUT_MACHINES = re.compile(r"^(?:tests|bookkit|\.ci|\.github)/")  # where such paths are the subject
SKIPPED = re.compile(r"\.(?:woff2?|png|jpe?g|gif|ico|zip|gz|pb|lock|svg)$|^site/extra/|(?:^|/)vendor/"
                     r"|\.min\.(?:js|css)$|^LICENSE")


def committed():
    done = subprocess.run(["git", "ls-files", "-z"], cwd=BOOK.root, capture_output=True, text=True)
    if done.returncode == 0:
        return [name for name in done.stdout.split("\0") if name]
    return [str(path.relative_to(BOOK.root)) for folder in ("book", "src", "bookkit", "notebooks")
            for path in (BOOK.root / folder).rglob("*") if path.is_file()]


def unfit(name, text):
    for pattern, why in FORBIDDEN.items():
        if "machine" in why and ABOUT_MACHINES.search(name):
            continue
        for found in re.finditer(pattern, text, re.M):
            line = text.count("\n", 0, found.start()) + 1
            yield f"{name}:{line}: {found[0]!r} {why}"


def test_committed_text():
    problems = []
    for name in committed():
        path = BOOK.root / name
        if SKIPPED.search(name) or not path.is_file():
            continue
        try:
            problems += unfit(name, path.read_text("utf-8"))
        except UnicodeDecodeError:
            continue
    verify(problems)
