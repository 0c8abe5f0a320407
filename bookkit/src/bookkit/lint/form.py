"""Rules of the two ends of a page: cells that show, and cells that prove what they show.

A show cell is what a reader reads: short, one idea, and something is seen when it has run. A proof
cell stands behind a strip that says its claim; it asserts, prints nothing, and nothing that a reader
reads needs it. Folded cells hold helpers, under a title.
"""

from __future__ import annotations

import ast
import re
import statistics
import symtable
from collections.abc import Iterator
from itertools import zip_longest

from bookkit.lint.anatomy import WRITTEN_MESH
from bookkit.lint.outputs import outputs, text_of_output
from bookkit.lint.rows import asserts
from bookkit.lint.rules import CHAPTER, PAGE, Page, Said, rule
from bookkit.model.chapter import CHECKED, EXERCISE_PARTS, Cell

RULE_LINES = 8  # of a show cell, as a rule: the median of a page with at least this many cells
PLAIN_LINES = 12  # of one that defines no function and no class
COPIED_LINES = 20  # of a function or a class to copy
VISIBLE_LINES = 250  # of a chapter
FOLDED = {"hide-cell", "hide-input"}  # with its output; its code alone
PHONE = 60  # columns of a line that a phone shows whole


def show_cells(page: Page) -> list[Cell]:
    """What is read as it stands: no proof, nothing folded, shared, or part of an exercise."""
    special = ("setup", "shared-", *EXERCISE_PARTS)
    return [
        cell
        for cell in page.chapter.shown
        if not FOLDED & set(cell.tags) and not any(tag.startswith(special) for tag in cell.tags)
    ]


def code_lines(cell: Cell) -> int:
    return sum(bool(line.strip()) for line in cell.lines)


def tree_of(cell: Cell) -> ast.Module:
    """What the cell says, or nothing if it is no Python, which the rule `plain-python` names."""
    try:
        return ast.parse(cell.source)
    except SyntaxError:
        return ast.Module([], [])


def line_in_file(cell: Cell, node: ast.AST) -> int:
    return cell.line + getattr(node, "lineno", 1) - 1


# Cells that show.


@rule(CHAPTER, PAGE)
def short_show_cells(page: Page) -> Said:
    """Show cells have 8 lines as a rule, functions and classes to copy 20, all else 12."""
    cells = show_cells(page)
    for cell in cells:
        count = code_lines(cell)
        definitions = (ast.FunctionDef, ast.ClassDef)
        defines = any(isinstance(node, definitions) for node in tree_of(cell).body)
        if count > COPIED_LINES:
            yield cell.line, f"{count} lines in a show cell; {COPIED_LINES} are the limit: split it"
        elif count > PLAIN_LINES and not defines:
            what = f"{count} lines in a show cell that defines nothing"
            yield cell.line, f"{what}; {PLAIN_LINES} are the limit: split it"
    lengths = [code_lines(cell) for cell in cells]
    if len(lengths) >= RULE_LINES and (median := statistics.median(lengths)) > RULE_LINES:
        what = f"the median show cell has {median:g} lines; {RULE_LINES} are the limit"
        yield 1, f"{what}: one idea in each cell"


@rule(CHAPTER)
def visible_lines(page: Page) -> Said:
    """A chapter shows at most 250 lines of code."""
    count = sum(map(code_lines, show_cells(page)))
    if count > VISIBLE_LINES:
        what = f"{count} lines of code are shown; {VISIBLE_LINES} are the limit"
        yield 1, f"{what}: fold helpers, or give what does not fit a page of its own"


UNREADABLE = {
    "a function on one line": "write its body on the next line",
    "a lambda with a name": "write def",
    "a walrus inside a call": "assign it on a line of its own",
    "eval of a string": "write the expression, or a function",
    "two `for`s and an `if` in one expression": "write a plain loop",
    "a generator unpacked into names": "write a line for each name",
}


def unreadable(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """(where, which of UNREADABLE) in a piece of code."""
    loops = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.lineno == node.body[0].lineno:
            yield node, "a function on one line"
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = node.value
            if isinstance(value, ast.Lambda):
                yield node, "a lambda with a name"
            elif any(isinstance(target, ast.Tuple | ast.List) for target in targets):
                parts = value.elts if isinstance(value, ast.Tuple | ast.List) else [value]
                inner = [part.value if isinstance(part, ast.Starred) else part for part in parts]
                if any(isinstance(part, ast.GeneratorExp) for part in inner):
                    yield node, "a generator unpacked into names"
        elif isinstance(node, ast.Call):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            for one in given:
                if any(isinstance(inner, ast.NamedExpr) for inner in ast.walk(one)):
                    yield one, "a walrus inside a call"
            if isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                yield node, "eval of a string"
        elif isinstance(node, loops):
            if len(node.generators) > 1 and any(one.ifs for one in node.generators):
                yield node, "two `for`s and an `if` in one expression"


@rule(CHAPTER, PAGE)
def read_once(page: Page) -> Said:
    """Show cells are readable before short: no one-line def, named lambda, walrus in a call, eval."""
    for cell in show_cells(page):
        for node, what in unreadable(tree_of(cell)):
            yield line_in_file(cell, node), f"{what}; {UNREADABLE[what]}"


@rule(CHAPTER, PAGE)
def shows_and_does_not_prove(page: Page) -> Said:
    """A show cell asserts only what a reader copies, with a message, or where it is tagged lesson."""
    for cell in show_cells(page):
        for node in ast.walk(tree_of(cell)):
            if isinstance(node, ast.Assert) and node.msg is None and "lesson" not in cell.tags:
                how = "move it to a proof cell, or give it the message that a reader needs"
                yield line_in_file(cell, node), f"an assertion in a cell that shows: {how}"


def something_seen(page: Page, cell: Cell) -> bool:
    """Did the cell show something when it ran; or will it, as far as its last line tells?"""
    if page.executed is not None:
        return any(one is cell for one, _ in outputs(page))
    body = tree_of(cell).body
    last = body[-1] if body else None
    if isinstance(last, ast.For | ast.With | ast.If):
        return any(isinstance(node, ast.Call) for node in ast.walk(last))
    return isinstance(last, ast.Expr)


@rule(CHAPTER, PAGE)
def ends_in_something_seen(page: Page) -> Said:
    """Each show cell, or the next one whose outputs are in view, shows something: a line, a
    table, a drawing."""
    shown = show_cells(page)
    in_view = [one for one in page.chapter.shown if one in shown or "hide-input" in one.tags]
    for cell, after in zip_longest(in_view, in_view[1:]):
        if cell not in shown:
            continue
        if not something_seen(page, cell) and not (after and something_seen(page, after)):
            how = "end it in a labelled print, an expression or a drawing"
            yield cell.line, f"neither this cell nor the next one shows anything: {how}"


# Names.


def bindings(statements: list[ast.stmt]) -> Iterator[tuple[str, str, ast.AST]]:
    """(name, what it is bound to, where) of what a cell binds, in order; a function's own names not."""
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, f"a {'class' if isinstance(node, ast.ClassDef) else 'function'}", node
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.split(".")[0]
                yield alias.asname or whole, f"the module {whole}", node
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}", node
        inner = [getattr(node, part, []) for part in ("body", "orelse", "finalbody")]
        inner += [handler.body for handler in getattr(node, "handlers", [])]
        held = {id(one) for part in inner for one in part}
        for child in ast.iter_child_nodes(node):
            if id(child) not in held and not isinstance(child, ast.ExceptHandler):
                yield from ((name, "a value", at) for name, at in names_stored(child))
        for part in inner:
            yield from bindings(part)


def names_stored(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Names that an expression or a target binds, but for those of lambdas and comprehensions."""
    own = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id, node
    elif isinstance(node, own):
        walrus = (one for one in ast.walk(node) if isinstance(one, ast.NamedExpr))
        yield from ((one.target.id, one) for one in walrus)
    else:
        for child in ast.iter_child_nodes(node):
            yield from names_stored(child)


@rule(CHAPTER, PAGE)
def one_meaning(page: Page) -> Said:
    """A name of a function, a class or a module means nothing else on its page."""
    first: dict[str, tuple[str, int]] = {}
    parts = ("setup", *EXERCISE_PARTS)
    for cell in page.chapter.shown:
        if any(tag.startswith(parts) for tag in cell.tags):
            continue
        for name, what, node in bindings(tree_of(cell).body):
            at = line_in_file(cell, node)
            before, line = first.setdefault(name, (what, at))
            again = what in ("a function", "a class")  # a second one; a module is the same one
            if line == at or (before == what and not again):
                continue
            new = what.replace("a ", "another ") if before == what else what
            said = f"{name} is {before} since line {line}, and becomes {new}"
            yield at, f"{said}: give it a name of its own"


# Folds and names of cells.


@rule(CHAPTER, PAGE)
def folded_cells(page: Page) -> Said:
    """A folded cell has a title, `# @title …`, and is folded everywhere: by its tag (hide-cell, or
    hide-input where what it draws stays in view) and by cellView."""
    for cell in page.chapter.code:
        folded, form = bool(FOLDED & set(cell.tags)), cell.metadata.get("cellView") == "form"
        if folded != form:
            missing = "`:cellView: form`, so that Colab folds it"
            if not folded:
                missing = "the tag hide-cell (or hide-input)"
            yield cell.line, f"folded here and not there: it needs {missing}"
        elif folded and not cell.title:
            what = "a folded cell without a title: its first line is `# @title What it holds`"
            yield cell.line, what


@rule(CHAPTER, PAGE)
def names_of_cells(page: Page) -> Said:
    """A tag id-SLUG names one cell of its page."""
    seen: dict[str, int] = {}
    for cell in page.chapter.code:
        slugs = [tag for tag in cell.tags if tag.startswith("id-")]
        if len(slugs) > 1:
            yield cell.line, f"a cell with two names, {' and '.join(slugs)}: keep one"
        for slug in slugs[:1]:
            if slug in seen:
                yield cell.line, f"{slug} names the cell at line {seen[slug]} too: choose another"
            seen.setdefault(slug, cell.line)


# Cells that prove.


def says_something(tree: ast.Module) -> ast.AST | None:
    """The first call of print or display, or a last line that is an expression to show."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("print", "display"):
            return node
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr) and not isinstance(last.value, ast.Call):
        return last
    return None


@rule(CHAPTER, PAGE)
def proof_cells(page: Page) -> Said:
    """A proof is folded under its claim, has a name, asserts, and prints nothing; a chapter has some."""
    proofs = [cell for cell in page.chapter.code if cell.is_proof]
    first: dict[str, int] = {}
    if not proofs and page.kind == CHAPTER:
        yield 1, "no proof: assert what the page claims in cells tagged proof, hide-cell, id-SLUG"
    for cell in page.chapter.code:
        if cell.is_proof and cell.claim is None:
            yield (
                cell.line,
                f"the first line of a proof is `# @title {CHECKED}the claim, a sentence`",
            )
        elif not cell.is_proof and (cell.title or "").startswith(CHECKED):
            yield cell.line, "it says what it checked: tag it proof"
        if "stored" in cell.tags and not cell.is_proof:
            yield cell.line, "tagged stored, which only a proof is: tag it proof too"
    shown = {id(cell) for cell, output in outputs(page)}
    for cell in proofs:
        if not cell.slug:
            yield cell.line, "a proof has a name for its strip's address: tag it id-SLUG"
        if "hide-cell" not in cell.tags:
            yield cell.line, "a proof is folded: tag it hide-cell, with `:cellView: form`"
        if cell.claim and first.setdefault(cell.claim, cell.line) != cell.line:
            yield cell.line, f"the claim of line {first[cell.claim]} once more: say what differs"
        if not asserts(cell):
            yield cell.line, "a proof that cannot fail: assert its claim"
        if node := says_something(tree_of(cell)):
            yield line_in_file(cell, node), "a proof prints nothing: show it in the cell before"
        elif id(cell) in shown:
            yield cell.line, "a proof prints nothing, but this one did: show it in the cell before"


def read_from_outside(cell: Cell) -> set[str]:
    """Names that a cell reads and does not bind, in its functions too."""
    try:
        tables = [symtable.symtable(cell.source, "cell", "exec")]
    except SyntaxError:
        return set()
    bound = {one.get_name() for one in tables[0].get_symbols() if one.is_assigned()}
    bound |= {one.get_name() for one in tables[0].get_symbols() if one.is_imported()}
    read = set()
    for table in tables:  # grows
        tables += table.get_children()
        for one in table.get_symbols():
            if one.is_referenced() and (table.get_type() == "module" or one.is_global()):
                read.add(one.get_name())
    return read - bound


@rule(CHAPTER, PAGE)
def proofs_apart(page: Page) -> Said:
    """No cell that shows reads a name that a proof has bound."""
    proven: dict[str, int] = {}
    for cell in page.chapter.code:
        bound = {name for name, _, _ in bindings(tree_of(cell).body)}
        if cell.is_proof:
            proven |= dict.fromkeys(bound, cell.line)
            continue
        for name in sorted(read_from_outside(cell) & set(proven)):
            what = f"{name} comes from the proof at line {proven[name]}"
            yield cell.line, f"{what}: bind it in a cell that shows, or rename it in the proof"
        for name in bound:
            proven.pop(name, None)


# Predictions.

PREDICTED = re.compile(r"predicted\b.*·\s*measured\b")


@rule(CHAPTER, PAGE)
def predictions(page: Page) -> Said:
    """A prediction: a paragraph Predict, its answer folded, a cell that prints predicted · measured."""
    cells = [cell for cell in page.chapter.code if "predicted" in cell.tags]
    if not cells and page.kind == CHAPTER:
        yield 1, "no prediction: ask for a number, and print `predicted X · measured Y`"
    before: list[str] = []
    for cell in page.chapter.cells:
        if cell.kind == "markdown":
            before.append(cell.source)
        elif "predicted" in cell.tags:
            text = "\n\n".join(before)
            for piece, how in (
                (r"(?m)^\*\*Predict\.\*\*", "a paragraph that begins **Predict.**"),
                (r'<details class="predict">', 'its answer in <details class="predict">'),
            ):
                if not re.search(piece, text):
                    yield cell.line, f"before a cell tagged predicted stands {how}: write it"
            before = []
    for cell in cells:
        yield from unlike_a_prediction(page, cell)
    rerun = [cell for cell in page.chapter.code if "rerun" in cell.tags]
    for cell in rerun:
        if "predicted" not in cell.tags:
            yield cell.line, "tagged rerun, which only a prediction is: tag it predicted too"
        elif "mesh.shape" not in cell.source and "mesh.size" not in cell.source:
            what = (
                "tagged rerun, but it reads neither mesh.shape nor mesh.size: what is typed holds"
            )
            yield cell.line, f"{what} for one mesh only, so take the tag away"
    makers = [cell for cell in page.chapter.code if "mesh" in cell.tags]
    if rerun and (len(makers) != 1 or makers[0].source.count(WRITTEN_MESH) != 1):
        what = (
            f"one cell is tagged mesh and holds {WRITTEN_MESH} once, for tests to put others there"
        )
        yield rerun[0].line, f"a prediction that is rerun, but no such mesh: {what}"


def unlike_a_prediction(page: Page, cell: Cell) -> Said:
    """What is wrong with the line that a cell tagged predicted prints."""
    wanted = f"`predicted X · measured Y`, at most {PHONE} columns"
    if page.executed is None:
        if not all(word in cell.source for word in ("predicted", "measured")):
            yield cell.line, f"tagged predicted, but it prints no line {wanted}"
        return
    said = [text_of_output(output) for one, output in outputs(page) if one is cell]
    lines = [line for line in "\n".join(said).splitlines() if PREDICTED.search(line)]
    if not lines:
        yield cell.line, f"tagged predicted, but it prints no line {wanted}"
    for line in lines:
        if len(line.rstrip()) > PHONE:
            yield cell.line, f"{len(line)} columns in {line[:40]!r}…; a phone shows {PHONE}"
