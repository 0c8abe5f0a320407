"""What the cells of a page printed, what the headings of its entries quote, what its tables say."""

import contextlib
import io
import re

import jax

from pages import Cell, cells_of, run, source_of

MARK = "\0"  # printed before each cell


@contextlib.contextmanager
def run_and_read(name):
    """Run a page. page.printed["slug"] is what the cell tagged id-slug printed, without blanks."""
    cells = []
    for cell in cells_of(name):
        cells += [Cell(f"before {cell.id}", f"print({MARK + cell.id!r})", []), cell]
    out = io.StringIO()
    with contextlib.ExitStack() as stack:
        with contextlib.redirect_stdout(out):
            page = stack.enter_context(run(name, cells=cells))
        parts = [part.partition("\n") for part in out.getvalue().split(MARK)[1:]]
        page.name, page.printed = name, {id: without_blanks(text) for id, _, text in parts}
        yield page


def without_blanks(text):
    return "".join(text.split())


def quoted_in_headings(name):
    """{slug of an entry: the pieces of messages that its heading quotes}. … stands for the rest."""
    found = {}
    for section in re.split(r"(?m)^## ", source_of(name).read_text("utf-8"))[1:]:
        heading, _, rest = section.partition("\n")
        if slug := re.search(r":tags: \[[^\]]*\bid-([\w-]+)", rest):
            messages = [
                text for _, text in re.findall(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", heading)
            ]
            pieces = [piece.strip() for message in messages for piece in message.split("…")]
            found[slug[1]] = [piece for piece in pieces if piece]
    return found


def said(function, *inputs):
    """The whole message of the error that function(*inputs) raises, with single blanks."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # JAX may print a path as well
            function(*inputs)
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    raise AssertionError("nothing was raised")


def assert_raised(page, slug, pieces, before=None, elsewhere=()):
    """The heading quotes these pieces, and the first cell of the entry printed each of them.

    `before` gives the words of earlier releases: {piece: (the first release with it, other words)}.
    The pieces `elsewhere`, at the end of the heading, are raised by another test.
    """
    assert quoted_in_headings(page.name)[slug] == [*pieces, *elsewhere]
    for piece in pieces:
        release, others = (before or {}).get(piece, ((), None))
        wanted = piece if jax.__version_info__ >= release else others
        assert without_blanks(wanted) in page.printed[slug], wanted


def rows_of(text, head):
    """A table of a page's text, by the beginning of its head: {first cell: {column: text}}."""
    lines = text.splitlines()
    (start,) = [i for i, line in enumerate(lines) if line.startswith(f"| {head} |")]
    names = [cell.strip() for cell in lines[start].strip("|").split("|")]
    found = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return found
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        found[cells[0]] = dict(zip(names, cells, strict=True))
