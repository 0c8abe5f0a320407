"""Programs of the book compiled again, for TPU and GPU; what was stored of them, and the claims.

book/compiled/claims.toml says which programs, and what the book claims of them;
companion/many_devices/compiled.json what each compiler made of them. `bookkit second-compiler` writes
the second from the first.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bookkit.model.book import Book, Problem
from bookkit.model.chapter import EXERCISE_PARTS, Cell, load_chapter

COMPILERS = ("cpu", "tpu", "gpu")


def table_path(book: Book) -> Path:
    return book.root / "book" / "compiled" / "claims.toml"


def rows_path(book: Book) -> Path:
    return book.root / "companion" / "many_devices" / "compiled.json"


@dataclass(frozen=True)
class Program:
    """A program of a page: its cells up to `after`, then the code `make`.

    The last line of `make` is `function, *inputs`, or calls what lowers one program with jax.jit.
    """

    name: str
    page: str  # "book/01-mesh"
    after: str  # the slug of a cell
    make: str
    devices: int = 8  # with more, the page's cells see as many simulated ones
    schedule: bool = False  # note what the compiler for GPU lets run beside collectives, too
    machine: str = ""  # "v5e:16x16", "h100:64": compiled for this alone, and priced; no claims
    # of XLA for GPU, where they are not at their defaults
    switches: Mapping[str, str | bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    page: str
    says: str  # one sentence, of the program that the CPU's compiler makes
    value: str  # Python that measures it on one compiler's rows, by the names of NAMES
    holds: str  # Python that judges `value`
    why: str = ""  # of TPU, where it does not hold there
    why_gpu: str = ""  # of GPU
    not_for_gpu: str = ""  # one sentence, where the program was not compiled for GPU
    about: str = "cpu"  # the compiler that the page says it of

    def reason(self, compiler: str) -> str:
        """What the page says where the claim does not hold for a compiler."""
        return self.why_gpu if compiler == "gpu" else self.why


@dataclass(frozen=True)
class Asked:
    """The table of programs and claims."""

    programs: dict[str, Program]
    claims: list[Comparison]

    def of_page(self, page: str) -> list[Program]:
        return [program for program in self.programs.values() if program.page == page]


def load_table(book: Book) -> Asked:
    path = table_path(book)
    where = path.relative_to(book.root).as_posix()
    try:
        found = tomllib.loads(path.read_text("utf-8")) if path.exists() else {}
        programs = {
            name: Program(name, **fields) for name, fields in found.get("program", {}).items()
        }
        claims = [Comparison(**fields) for fields in found.get("claim", [])]
    except (tomllib.TOMLDecodeError, TypeError) as error:
        raise Problem(f"{where} cannot be read: {error}") from None
    for program in programs.values():
        cells_before(book, program)  # says what is wrong
    return Asked(programs, claims)


def cells_before(book: Book, program: Program) -> list[Cell]:
    """The cells that lead to a program, in order, without exercises and cells that must raise."""
    chapter = load_chapter(book.source(program.page))
    last = chapter.named(program.after)
    if last is None:
        raise Problem(
            f"book/compiled/claims.toml: program {program.name} asks for the cell "
            f"id-{program.after}, which {program.page}.md does not have"
        )
    return [
        cell
        for cell in chapter.code
        if cell.index <= last.index
        and not any(cell.tagged(part) for part in EXERCISE_PARTS)
        and "raises-exception" not in cell.tags
    ]


def digest_of_code(book: Book, program: Program) -> str:
    """Of all the code that leads to a program: the same code makes the same program.

    Setup cells only prepare a place to run, and name wheels and branches.
    """
    sources = [cell.source for cell in cells_before(book, program) if "setup" not in cell.tags]
    options = [repr(sorted(program.switches.items()))] if program.switches else []
    options += [program.machine] if program.machine else []
    return hashlib.sha256("\0".join([*sources, program.make, *options]).encode()).hexdigest()[:16]


def load_rows(book: Book) -> dict[str, Any]:
    path = rows_path(book)
    return json.loads(path.read_text("utf-8")) if path.exists() else {"about": {}, "programs": {}}


# What claims are measured with


class Measured:
    """What one compiler made of the programs, by their names."""

    def __init__(self, programs: Mapping[str, Any], compiler: str) -> None:
        self._programs, self._compiler = programs, compiler

    def _found(self, name: str) -> dict[str, Any]:
        if name not in self._programs:
            raise Problem(
                f"companion/many_devices/compiled.json has no program {name}: run `make second-compiler`"
            )
        return self._programs[name][self._compiler]

    def _rows(
        self, name: str, kind: str | None, axes: str | None, dtype: str | None
    ) -> Iterator[dict[str, Any]]:
        found = self._found(name)
        if "refused" in found:
            raise Problem(f"{name} was refused by the compiler for {self._compiler}")
        for row in found["moves"]:
            wanted = ((kind, row["kind"]), (axes, ",".join(row["axes"])), (dtype, row["dtype"]))
            if all(asked in (None, has) for asked, has in wanted):
                yield row

    def _sum(self, field: str, *which: Any) -> int | None:
        values = [row[field] for row in self._rows(*which)]
        return None if None in values else sum(values)

    def sent(
        self, name: str, kind: str | None = None, axes: str | None = None, dtype: str | None = None
    ) -> int | None:
        """Bytes that one device sends in a run; None where the text does not say how often."""
        return self._sum("wire", name, kind, axes, dtype)

    def payload(
        self, name: str, kind: str | None = None, axes: str | None = None, dtype: str | None = None
    ) -> int | None:
        return self._sum("payload", name, kind, axes, dtype)

    def executions(
        self, name: str, kind: str | None = None, axes: str | None = None, dtype: str | None = None
    ) -> int | None:
        return self._sum("executions", name, kind, axes, dtype)

    def kinds(self, name: str, axes: str | None = None) -> str:
        """Kinds of collectives in a program, in words."""
        return (
            ", ".join(sorted({row["kind"] for row in self._rows(name, None, axes, None)})) or "none"
        )

    def dtypes(self, name: str, kind: str | None = None) -> str:
        return ", ".join(sorted({row["dtype"] for row in self._rows(name, kind, None, None)}))

    def rows(self, name: str) -> list[tuple[Any, ...]]:
        """All that moves, to compare programs by."""
        return sorted(
            (row["kind"], tuple(row["axes"]), row["dtype"], row["payload"], row["executions"])
            for row in self._rows(name, None, None, None)
        )

    def memory(self, name: str, part: str) -> int:
        """Bytes on each device: arguments, outputs, temporaries or aliased."""
        return self._found(name)["memory"][part]

    def takes(self, name: str) -> int:
        """Bytes that a program takes on each device."""
        import meshscope as ms  # and JAX with it, which most commands do without

        return ms.ProgramMemory(**self._found(name)["memory"]).bytes_per_device

    def refused(self, name: str) -> str:
        """What the compiler said in place of a program, or nothing."""
        return self._found(name).get("refused", "")


@dataclass(frozen=True)
class Judged:
    """A claim, measured on each compiler."""

    claim: Comparison
    values: dict[str, Any]
    holds: dict[str, bool]  # by compiler that it was compiled with


def judge(asked: Asked, programs: Mapping[str, Any]) -> list[Judged]:
    """Every claim on each compiler."""
    found = []
    for claim in asked.claims:
        values, holds = {}, {}
        for compiler in COMPILERS:
            if compiler == "gpu" and claim.not_for_gpu:
                continue
            measured = Measured(programs, compiler)
            public = {name: getattr(measured, name) for name in dir(measured) if name[:1].isalpha()}
            values[compiler] = evaluate(claim, claim.value, public)
            known = {"value": values[compiler], **public}
            holds[compiler] = bool(evaluate(claim, claim.holds, known))
        found.append(Judged(claim, values, holds))
    return found


def evaluate(claim: Comparison, code: str, names: Mapping[str, Callable[..., Any] | Any]) -> Any:
    try:
        return eval(code, {"__builtins__": {}}, {**SAFE, **names})
    except Problem:
        raise
    except Exception as error:
        raise Problem(
            f"book/compiled/claims.toml: {code!r} of the claim {claim.says!r}: "
            f"{type(error).__name__}: {error}"
        ) from None


SAFE = {"round": round, "abs": abs, "max": max, "min": min, "len": len, "sum": sum, "set": set}


def as_shown(value: Any) -> str:
    """A measured value as the page has it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, (tuple, list)):
        return ", ".join(map(as_shown, value))
    return "unknown" if value is None else str(value)
