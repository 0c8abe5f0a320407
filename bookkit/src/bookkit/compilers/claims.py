"""Programs of the book compiled again, for TPU and GPU; what was stored of them, and the claims.

book/compiled/claims.toml says which programs, and what the book claims of them;
companion/many_devices/compiled.json what each compiler made of them, and book/compiled/codes.json of
what code. `bookkit second-compiler` writes both.
"""

from __future__ import annotations

import functools
import hashlib
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bookkit.model.book import Book, Problem
from bookkit.model.chapter import EXERCISE_PARTS, Cell, load_chapter

COMPILERS = {"cpu": "CPU", "tpu": "TPU", "gpu": "GPU"}


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
class Claim:
    page: str
    says: str  # one sentence, of the program that the CPU's compiler makes
    value: str  # Python that measures it on one compiler's rows, with the functions of `measures`
    holds: str  # Python that judges `value`
    why: str = ""  # of TPU, where it does not hold there
    why_gpu: str = ""  # of GPU
    not_for_gpu: str = ""  # one sentence, where the program was not compiled for GPU
    about: str = "cpu"  # the compiler that the page says it of

    def reason(self, compiler: str) -> str:
        """What the page says where the claim does not hold for a compiler."""
        return self.why_gpu if compiler == "gpu" else self.why


def load_table(book: Book) -> tuple[dict[str, Program], list[Claim]]:
    """The programs, by name, and the claims."""
    text = (book.root / "book" / "compiled" / "claims.toml").read_text("utf-8")
    try:
        found = tomllib.loads(text)
        programs = {name: Program(name, **fields) for name, fields in found["program"].items()}
        return programs, [Claim(**fields) for fields in found["claim"]]
    except (tomllib.TOMLDecodeError, TypeError) as error:
        raise Problem(f"book/compiled/claims.toml cannot be read: {error}") from None


def cells_before(book: Book, program: Program) -> list[Cell]:
    """The cells that make a program, in order.

    Without exercises and setup cells: these only prepare a place to run.
    """
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
        and "setup" not in cell.tags
    ]


def digest_of_code(book: Book, program: Program) -> str:
    """Of all the code that leads to a program: the same code makes the same program."""
    sources = [cell.source for cell in cells_before(book, program)]
    options = [repr(sorted(program.switches.items()))] if program.switches else []
    options += [program.machine] if program.machine else []
    return hashlib.sha256("\0".join([*sources, program.make, *options]).encode()).hexdigest()[:16]


def rows_path(book: Book) -> Path:
    return book.root / "companion" / "many_devices" / "compiled.json"


def codes_path(book: Book) -> Path:
    """Of the code that each program was compiled from; not for readers, so not in the companion."""
    return book.root / "book" / "compiled" / "codes.json"


def load_rows(book: Book) -> dict[str, Any]:
    """What was stored: "about", the releases and the date; "programs", what each compiler made."""
    rows = json.loads(rows_path(book).read_text("utf-8"))
    codes = json.loads(codes_path(book).read_text("utf-8"))
    for name, program in rows["programs"].items():
        program["code"] = codes.get(name)
    return rows


# Claims, measured on what each compiler made.


@dataclass(frozen=True)
class Judged:
    """A claim, measured on each compiler."""

    claim: Claim
    values: dict[str, Any]
    holds: dict[str, bool]  # by compiler that it was compiled with


def judge(claims: Sequence[Claim], programs: Mapping[str, Any]) -> list[Judged]:
    """Every claim on each compiler."""
    found = []
    for claim in claims:
        values, holds = {}, {}
        for compiler in COMPILERS:
            if compiler == "gpu" and claim.not_for_gpu:
                continue
            known = measures(programs, compiler)
            known["value"] = values[compiler] = evaluate(claim, claim.value, known)
            holds[compiler] = bool(evaluate(claim, claim.holds, known))
        found.append(Judged(claim, values, holds))
    return found


def evaluate(claim: Claim, code: str, names: dict[str, Any]) -> Any:
    try:
        return eval(code, names.copy())
    except Exception as error:
        raise Problem(
            f"book/compiled/claims.toml: {code!r} of the claim {claim.says!r}: "
            f"{type(error).__name__}: {error}"
        ) from None


def measures(programs: Mapping[str, Any], compiler: str) -> dict[str, Callable[..., Any]]:
    """The functions that claims are measured with, by name, for what one compiler made.

    sent, payload, executions(program, kind, axes, dtype)  what moves in a run, of one device, in
        bytes or times; each of the last three may be None; None where the text does not say how often
    kinds(program, axes), dtypes(program, kind)  of its collectives, in words
    rows(program)          all that moves, to compare programs by
    memory(program, part)  bytes on a device: arguments, outputs, temporaries, aliased
    takes(program)         bytes that it takes on a device
    refused(program)       what the compiler said in place of a program, or nothing
    """

    def moves(
        name: str, kind: str | None = None, axes: str | None = None, dtype: str | None = None
    ) -> list[dict[str, Any]]:
        if said := refused(name):
            raise ValueError(f"the compiler for {COMPILERS[compiler]} refused {name}: {said}")
        return [
            row
            for row in programs[name][compiler]["moves"]
            if kind in (None, row["kind"])
            and axes in (None, ",".join(row["axes"]))
            and dtype in (None, row["dtype"])
        ]

    def total(of: str, name: str, *which: str | None) -> int | None:
        values = [row[of] for row in moves(name, *which)]
        return None if None in values else sum(values)

    def kinds(name: str, axes: str | None = None) -> str:
        return ", ".join(sorted({row["kind"] for row in moves(name, None, axes)})) or "none"

    def dtypes(name: str, kind: str | None = None) -> str:
        return ", ".join(sorted({row["dtype"] for row in moves(name, kind)}))

    def rows(name: str) -> list[tuple[Any, ...]]:
        return sorted(
            (row["kind"], tuple(row["axes"]), row["dtype"], row["payload"], row["executions"])
            for row in moves(name)
        )

    def memory(name: str, part: str) -> int:
        return programs[name][compiler]["memory"][part]

    def takes(name: str) -> int:
        import meshscope as ms  # and JAX with it, which most commands do without

        return ms.ProgramMemory(**programs[name][compiler]["memory"]).bytes_per_device

    def refused(name: str) -> str:
        return programs[name][compiler].get("refused", "")

    return {
        "sent": functools.partial(total, "wire"),
        "payload": functools.partial(total, "payload"),
        "executions": functools.partial(total, "executions"),
        "kinds": kinds,
        "dtypes": dtypes,
        "rows": rows,
        "memory": memory,
        "takes": takes,
        "refused": refused,
    }
