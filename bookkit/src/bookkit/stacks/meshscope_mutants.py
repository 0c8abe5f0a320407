"""Plant faults in the functions of src/meshscope, one at a time, and see whether its tests notice.

    bookkit mutants-meshscope                           every fault that mutmut thinks of
    bookkit mutants-meshscope --number 600 --seed 1     a sample, the same while other code changes
    bookkit mutants-meshscope --seconds 600 --only _hlo.parse

Of those tried, 90 % must be noticed, and each other must stand in tests/meshscope/survivors.toml with
the reason why it survives. An entry there that is noticed, or whose line is gone, is to be removed.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import importlib
import math
import multiprocessing
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType
from typing import Any

from bookkit.model.book import Problem, find_root
from bookkit.stacks.mutant_worker import function_code, serve_tests
from bookkit.stacks.wheel import environment_with

MUTMUT = "mutmut==3.8.1"  # thinks of the faults; planting and testing are done here
LEAST_NOTICED = 0.9
SURVIVORS = Path("tests", "meshscope", "survivors.toml")
Key = tuple[str, str, str]  # of a fault in the list: function, line, what that becomes


class Module:
    """A module of meshscope, and where its functions and their statements stand."""

    def __init__(self, path: Path) -> None:
        self.name, self.source = path.stem, path.read_text("utf-8")
        tree = ast.parse(self.source)
        self.statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
        self.functions: dict[str, range] = {}
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        bodies = [("", tree.body), *((f"{node.name}.", node.body) for node in classes)]
        for before, body in bodies:
            for node in body:
                if isinstance(node, ast.FunctionDef):
                    lines = range(node.lineno, (node.end_lineno or 0) + 1)
                    self.functions[before + node.name] = lines

    def statement(self, line: int) -> range:
        """The lines of the statement that a line is in; of one with a body, its head."""
        holding = [s for s in self.statements if s.lineno <= line <= (s.end_lineno or 0)]
        last = holding[-1]  # found last by a walk in breadth: the innermost
        body = getattr(last, "body", None)
        return range(last.lineno, body[0].lineno if body else (last.end_lineno or 0) + 1)


def bare(code: CodeType) -> CodeType:
    """A code object without its places in the text."""
    consts = tuple(bare(c) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_consts=consts, co_linetable=b"", co_firstlineno=1)


@dataclass
class Mutant:
    module: Module
    function: str
    line: int
    order: str  # its place in a sample, which no other code changes
    nodes: tuple[Any, Any, Any]  # of the module, what is replaced, by what

    @cached_property
    def source(self) -> str:
        """The module with the fault."""
        return (
            importlib.import_module("mutmut.mutation.file_mutation").deep_replace(*self.nodes).code
        )

    @cached_property
    def key(self) -> Key:
        a, b = self.module.source.splitlines(), self.source.splitlines()
        blocks = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
        parts = [(a[i:j], b[k:m]) for what, i, j, k, m in blocks if what != "equal"]
        line, becomes = ("\n".join(x.strip() for pair in parts for x in pair[n]) for n in (0, 1))
        return f"{self.module.name}.{self.function}", line, becomes

    def changes_code(self) -> bool:
        """Not so if only a default, which is evaluated elsewhere, or nothing that runs differs."""
        both = (compile(text, "", "exec") for text in (self.module.source, self.source))
        old, new = (bare(function_code(code, self.function)) for code in both)
        return old != new


def mutants_of(module: Module, seed: int) -> Iterator[Mutant]:
    """Every fault that mutmut has for the functions of a module, properties too."""
    libcst, metadata, mutation = (importlib.import_module(name) for name in (
        "libcst", "libcst.metadata", "mutmut.mutation.file_mutation"))  # fmt: skip

    class Everywhere(mutation.MutationVisitor):  # type: ignore[name-defined]
        def _skip_node_and_children(self, node: Any) -> bool:
            # mutmut's way of planting cannot reach decorated functions; this one can.
            return not isinstance(node, libcst.FunctionDef) and super()._skip_node_and_children(
                node
            )

    wrapper = metadata.MetadataWrapper(libcst.parse_module(module.source))
    ignored = mutation.get_ignored_lines(module.name, module.source, wrapper, None)
    visitor = Everywhere(mutation.mutation_operators, ignored)
    tree = wrapper.visit(visitor)
    places, seen = wrapper.resolve(metadata.PositionProvider), Counter[str]()
    for found in visitor.mutations:
        old, new = found.original_node, found.mutated_node
        line = places[old].start.line
        inside = [name for name, lines in module.functions.items() if line in lines]
        if not inside:
            continue
        text = "\0".join([module.name, inside[0], *map(tree.code_for_node, (old, new))])
        seen[text] += 1
        order = hashlib.sha256(f"{seed} {seen[text]} {text}".encode()).hexdigest()
        yield Mutant(module, inside[0], line, order, (tree, old, new))


class Trial:
    """Which tests run what, and the worker that tries faults on them."""

    def __init__(self, root: Path) -> None:
        self.root, self.known = root, Counter[tuple[str, str]]()
        self.begin()
        self.tests = self.ask("measure")
        if bad := [name for name, (_, lines) in self.tests.items() if lines is None]:
            raise Problem("These tests fail without a fault; mend them first: " + ", ".join(bad))

    def begin(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, its = context.Pipe()
        cache = self.root / "_build" / "mutants-meshscope"
        self.process = context.Process(
            target=serve_tests, args=(its, self.root, cache), daemon=True
        )
        self.process.start()
        its.close()

    def ask(self, *order: Any) -> Any:
        """What the worker answers; Problem if it stops, or does not go on."""
        running, patience = "the start", 300.0
        try:
            self.pipe.send(order)
            while self.pipe.poll(patience):
                kind, *told = self.pipe.recv()
                if kind == "answer":
                    return told[0]
                running, patience = told[0], 300 + 60 * told[1]
        except (EOFError, OSError):
            raise Problem(f"stops in {running}") from None
        raise Problem(f"hangs in {running}")

    def end(self) -> None:
        self.process.kill()
        self.process.join()

    def noticed(self, mutant: Mutant) -> str | None:
        """By which test a fault is noticed: of those that run its statement the short ones first,
        and those that noticed others in the module."""
        lines = {(mutant.module.name, line) for line in mutant.module.statement(mutant.line)}
        tests = [(name, seconds) for name, (seconds, run) in self.tests.items() if lines & set(run)]
        name = mutant.module.name
        tests.sort(key=lambda test: (test[1] + 0.05) / (1 + self.known[name, test[0]]))
        try:
            failed, still = self.ask("exchange", name, mutant.function, mutant.source, tests)
        except Problem as lost:
            failed, still = str(lost), True
        if still:  # the fault left something behind
            self.end()
            self.begin()
        self.known[name, failed or ""] += 1
        return failed


def survivors(root: Path, modules: Sequence[Module]) -> dict[Key, str]:
    """The list's reasons; Problem if an entry is incomplete or its line is gone."""
    entries = tomllib.loads((root / SURVIVORS).read_text("utf-8")).get("survivor", [])
    code: dict[str, set[str]] = {}
    for module in modules:
        text = [line.strip() for line in module.source.splitlines()]
        for name, at in module.functions.items():
            code[f"{module.name}.{name}"] = set(text[at.start - 1 : at.stop - 1])
    listed: dict[Key, str] = {}
    for entry in entries:
        asked = ["becomes", "reason", *(["part"] if "part" in entry else ["function", "line"])]
        if missing := [part for part in asked if not entry.get(part)]:
            raise Problem(f"{SURVIVORS}: an entry says nothing about {', '.join(missing)}: {entry}")
        listed |= dict.fromkeys(keys(entry, code), entry["reason"])
    return listed


def keys(entry: dict[str, Any], code: dict[str, set[str]]) -> list[Key]:
    """The faults that an entry lists: of its line, or of every line that has its part."""
    becomes = [entry["becomes"]] if isinstance(entry["becomes"], str) else entry["becomes"]
    if "part" not in entry:
        function, line = entry["function"], entry["line"]
        if not set(line.split("\n")) <= code.get(function, set()):
            raise Problem(
                f"{SURVIVORS}: {function} has no line {line!r} any more: remove the entry"
            )
        return [(function, line, new) for new in becomes]
    part, where = entry["part"], entry.get("function")
    found = [(name, line) for name, lines in code.items() if where in (None, name)
             for line in lines if part in line]  # fmt: skip
    if not found:
        raise Problem(
            f"{SURVIVORS}: {where or 'meshscope'} has no line with {part!r} any more: "
            "remove the entry"
        )
    return [(name, line, line.replace(part, new)) for name, line in found for new in becomes]


def try_all(
    trial: Trial, mutants: Sequence[Mutant], listed: dict[Key, str], end: float
) -> list[str]:
    """Plant faults until the time is over; print how it went; what is to be mended."""
    counts, problems, began = Counter[tuple[str, bool]](), [], time.monotonic()
    for mutant in mutants:
        if time.monotonic() > end:
            break
        if not mutant.changes_code():
            continue
        how = trial.noticed(mutant)
        counts[mutant.module.name, bool(how)] += 1
        if how and mutant.key in listed:
            problems.append(
                f"{mutant.key} stands in {SURVIVORS}, but is noticed by {how}: remove it"
            )
        if not how:
            word = "listed" if mutant.key in listed else "SURVIVED"
            print("\n".join([f"{word} line {mutant.line}", *map(repr, mutant.key)]), flush=True)
            if word != "listed":
                problems.append(
                    f"{mutant.key} is not noticed: write a test, or a reason in {SURVIVORS}"
                )
    print(f"\n{'module':14} noticed survived")
    for name in sorted({name for name, _ in counts}):
        print(f"{name:14} {counts[name, True]:7} {counts[name, False]:8}")
    noticed = sum(number for (_, how), number in counts.items() if how)
    rate = noticed / max(counts.total(), 1)
    spent = time.monotonic() - began
    print(f"{noticed} of {counts.total()} noticed: {rate:.1%}; {spent:.0f} s")
    if rate < LEAST_NOTICED:
        problems.append(
            f"{rate:.1%} are noticed, not {LEAST_NOTICED:.0%}: write tests for what survived"
        )
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "bookkit mutants-meshscope", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--only", default="", help="functions that begin so, like _hlo.parse")
    parser.add_argument("--number", type=int, help="how many, at most")
    parser.add_argument("--seconds", type=float, default=math.inf, help="plant none after these")
    parser.add_argument("--seed", type=int, default=1, help="of the order in which they are tried")
    chosen, root = parser.parse_args(arguments), find_root()
    end = time.monotonic() + chosen.seconds
    if sys.version_info < (3, 12):
        raise Problem(
            "Python tells which test runs which line from 3.12 on: make PYTHON=python3.12"
        )
    modules = [Module(path) for path in sorted((root / "src" / "meshscope").glob("*.py"))]
    listed = survivors(root, modules)
    library = (
        environment_with(root, "mutmut", [MUTMUT]).parents[1].glob("lib/python*/site-packages")
    )
    sys.path += map(str, library)  # behind what is installed here
    mutants = [mutant for module in modules for mutant in mutants_of(module, chosen.seed)
               if f"{module.name}.{mutant.function}".startswith(chosen.only)]  # fmt: skip
    print(f"{len(mutants)} faults; seed {chosen.seed}", flush=True)
    mutants.sort(key=lambda mutant: mutant.order)
    trial = Trial(root)
    try:
        problems = try_all(trial, mutants[: chosen.number], listed, end)
    finally:
        trial.end()
    if problems:
        print("\nTo mend:\n" + "\n".join("  " + problem for problem in problems))
    return bool(problems)
