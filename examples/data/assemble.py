"""Write book.txt, the text that train.py learns unless told otherwise: the prose of this book.

    python examples/data/assemble.py

It takes the pages of book/ in the order of the contents, leaves out code, tables, figures, formulas
and addresses, and stops at 280,000 bytes. The prose is under CC BY 4.0 (LICENSE-TEXT.txt), and so is
book.txt. The file is a copy of one day: nothing has to be written anew when a page changes.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(__file__).with_name("book.txt")
MOST = 280_000  # bytes


def prose(page: str) -> str:
    """The paragraphs, headings and lists of a page."""
    page = re.sub(r"\A---\n.*?\n---\n", "", page, flags=re.S)  # settings of the notebook
    page = re.sub(r"^(`{3,}|~{3,}).*?^\1\s*$", "", page, flags=re.S | re.M)  # code
    page = re.sub(r"\$\$.*?\$\$", "", page, flags=re.S)
    page = re.sub(r"<!--.*?-->|</?\w[^>\n]*>", "", page, flags=re.S)
    page = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", page)  # figures
    page = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", page)  # links keep their words
    page = re.sub(r"^\s*(\||>\s*\[!|\(\w[\w-]*\)=|✓|\+\+\+).*$", "", page, flags=re.M)
    page = re.sub(r"^>\s?", "", page, flags=re.M)
    page = page.replace("**", "").replace("`", "")
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+$", "", page, flags=re.M)).strip()


def pages() -> list[Path]:
    """In the order of the contents."""
    names = re.findall(r"^\s*-?\s*(?:file|root): (book/\S+)", (ROOT / "_toc.yml").read_text(), re.M)
    return [path for name in names if (path := ROOT / f"{name}.md").exists()]


def main() -> None:
    text = "\n\n".join(prose(page.read_text(encoding="utf-8")) for page in pages())
    kept = text.encode()[:MOST].decode(errors="ignore")
    kept = kept[: kept.rindex("\n\n") + 1]
    if len(kept) < MOST / 2:
        sys.exit(f"only {len(kept)} characters were found in {ROOT / 'book'}: look at _toc.yml")
    TARGET.write_text(kept, encoding="utf-8")
    print(f"{TARGET.name}: {len(kept.encode()):,} bytes")


if __name__ == "__main__":
    main()
