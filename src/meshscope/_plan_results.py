"""Results on disk: one line of JSON for each candidate, written whole."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]
_START = b'{"digest": "'  # of a line


class Results:
    """The records of a file by digest of the program; a file that is not there yet is empty.

    A line is written in one piece, and reaches the disk before the next candidate begins. The
    line that a killed process left unfinished is not read, and the next record starts anew.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = Path(path) if path is not None else None
        self.records: dict[str, Record] = {}
        if self.path is None or not self.path.exists():
            return
        for number, line in enumerate(self.path.read_bytes().split(b"\n"), 1):
            try:
                record = json.loads(line) if line.strip() else None
            except ValueError:
                # One that was cut off in the middle is passed over.
                record = None if line.startswith(_START[: len(line)]) else line
            if record is None:
                continue
            if not isinstance(record, dict) or not isinstance(record.get("digest"), str):
                raise ValueError(
                    f"{self.path}, line {number}, is not a result of meshscope plan: give another "
                    "file to keep results in, or remove this one"
                )
            self.records[record["digest"]] = record

    def add(self, record: Record) -> None:
        """Keep a record, in the file too."""
        self.records[record["digest"]] = record
        if self.path is None:
            return
        line = json.dumps(record).encode() + b"\n"
        with open(self.path, "a+b", buffering=0) as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = b"\n" + line  # after one that was cut off
            file.write(line)  # at the end, wherever the last read was
            os.fsync(file.fileno())

    @property
    def _running(self) -> Path | None:
        return None if self.path is None else self.path.with_name(self.path.name + ".running")

    @contextlib.contextmanager
    def running(self, record: Record) -> Iterator[None]:
        """Leave the candidate's name beside the file for as long as the compiler has it.

        A compiler may end the whole process. Whoever started that process then reads which
        candidate it was.
        """
        if self._running is None:
            yield
            return
        self._running.write_text(json.dumps(record), "utf-8")
        try:
            yield
        finally:
            self._running.unlink(missing_ok=True)

    def interrupted(self) -> Record | None:
        """The candidate that a process which has ended was compiling, once; or None."""
        if self._running is None or not self._running.exists():
            return None
        text = self._running.read_text("utf-8")
        self._running.unlink()
        try:
            record = json.loads(text)
        except ValueError:
            return None  # it was cut off before it began
        return record if isinstance(record, dict) else None
