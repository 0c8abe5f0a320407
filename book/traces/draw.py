"""Draw the timeline of page 04a-train-checks from a trace of JAX's profiler.

    python book/traces/draw.py                  draws book/traces/train.json.gz
    python book/traces/draw.py --keep FOLDER    first cuts that trace from a new recording

The picture is site/static/train-trace.svg.

To record, run the test of the profiler with a folder of your own in place of the temporary
one. Of a recording only what is drawn is kept: which device ran what, from when to when, and the
calls in Python. No paths and no names of machines.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from bookkit.model.book import Problem

HERE = Path(__file__).resolve().parent
TRACE = HERE / "train.json.gz"
PICTURE = HERE.parents[1] / "site" / "static" / "train-trace.svg"
CALL, WAIT = "call", "wait"
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass(frozen=True)
class Bar:
    """What one lane did, in microseconds from the first call."""

    lane: str  # "Python" or the number of a device
    what: str  # call, wait, compute or the kind of a collective
    start: float
    length: float


def events(folder: Path) -> list[dict[str, Any]]:
    """The complete events of the one recording in a folder of the profiler."""
    found = sorted(folder.rglob("*.trace.json.gz"))
    if len(found) != 1:
        raise Problem(
            f"{folder} holds {len(found)} files *.trace.json.gz; give the folder of one recording"
        )
    trace = json.loads(gzip.decompress(found[0].read_bytes()))
    return [event for event in trace["traceEvents"] if event.get("ph") == "X"]


def cut(recorded: list[dict[str, Any]]) -> list[Bar]:
    """The bars of a recording: instructions by device, and Python's calls and waiting."""
    bars = []
    for event in recorded:
        name, args = event["name"], event.get("args") or {}
        start, length = float(event["ts"]), float(event.get("dur", 0))
        operation = str(args.get("hlo_op", ""))
        if "device_ordinal" in args and operation and not operation.startswith(("while", "call")):
            kind = next((kind for kind in COLLECTIVES if operation.startswith(kind)), "compute")
            bars.append(Bar(str(args["device_ordinal"]), kind, start, length))
        elif name.startswith("PjitFunction") or "Compiled.call" in name or " __call__" in name:
            bars.append(Bar("Python", CALL, start, length))
        elif "block_until_ready" in name:
            bars.append(Bar("Python", WAIT, start, length))
    if not bars:
        raise Problem("the recording holds no instruction of a device; was anything run in it?")
    zero = min(bar.start for bar in bars)
    moved = [Bar(b.lane, b.what, round(b.start - zero, 1), round(b.length, 1)) for b in bars]
    return sorted(joined(moved), key=lambda bar: (bar.lane, bar.start))


def joined(bars: list[Bar], gap: float = 5.0) -> list[Bar]:
    """Neighbours that do the same become one bar; nested ones disappear in the outer."""
    result: list[Bar] = []
    last: dict[tuple[str, str], int] = {}
    for bar in sorted(bars, key=lambda bar: (bar.start, -bar.length)):
        key = bar.lane, bar.what
        before = result[last[key]] if key in last else None
        if before and bar.start <= before.start + before.length + (
            gap if bar.lane != "Python" else 0
        ):
            end = max(before.start + before.length, bar.start + bar.length)
            result[last[key]] = Bar(*key, before.start, round(end - before.start, 1))
        else:
            last[key] = len(result)
            result.append(bar)
    return [bar for bar in result if bar.length >= 2]


def write(bars: list[Bar], path: Path) -> None:
    rows = [[bar.lane, bar.what, bar.start, bar.length] for bar in bars]
    text = json.dumps(rows, separators=(",", ":"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def read(path: Path) -> list[Bar]:
    return [Bar(*row) for row in json.loads(gzip.decompress(path.read_bytes()))]


# The collectives of the recording run over `data`: two shades of that axis' colour.
PAPER, INK = "#fdfcfa", "#1c2025"
FILLS = {
    CALL: "#1c2025",
    WAIT: "#ddd9cf",
    "compute": "#8c6d1f",
    "all-gather": "#0065b0",
    "all-reduce": "#8cc4ea",
}
LEFT, WIDTH, LANE = 78, 660, 20


def draw(bars: list[Bar]) -> str:
    """The picture, the same bytes for the same bars."""
    lanes = ["Python", *sorted({b.lane for b in bars} - {"Python"}, key=int)]
    total = max(bar.start + bar.length for bar in bars)
    kinds = [kind for kind in FILLS if any(bar.what == kind for bar in bars)]
    if unknown := {bar.what for bar in bars} - set(FILLS):
        raise Problem(f"no colour for {', '.join(sorted(unknown))}; add one to FILLS")
    high = 34 + LANE * len(lanes) + 40
    says = (
        f"Timeline of {total / 1000:.0f} milliseconds, one row for Python and "
        f"{len(lanes) - 1} for devices: Python's calls end long before the devices do."
    )
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label={quoteattr(says)} '
        f'width="{LEFT + WIDTH + 22}" height="{high}" viewBox="0 0 {LEFT + WIDTH + 22} {high}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" rx="6" fill="{PAPER}"/>',
    ]

    def text(x: float, y: float, words: str, anchor: str = "start") -> None:
        out.append(
            f'<text x="{x:.1f}" y="{y:.1f}" fill="{INK}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    for row, lane in enumerate(lanes):
        text(LEFT - 8, 44 + LANE * row, lane if row == 0 else f"device {lane}", "end")
    for kind in kinds:  # one path for each: a fifth of the bytes of single rectangles
        boxes = []
        for bar in (bar for bar in bars if bar.what == kind):
            x, y = LEFT + WIDTH * bar.start / total, 32 + LANE * lanes.index(bar.lane)
            wide = max(WIDTH * bar.length / total - (0.8 if kind == CALL else 0), 0.3)
            boxes.append(f"M{x:.1f} {y}h{wide:.1f}v{LANE - 5}h-{wide:.1f}")
        out.append(f'<path fill="{FILLS[kind]}" d="{"".join(boxes)}"/>')
    for part in range(5):
        x = LEFT + WIDTH * part / 4
        text(x, 20, f"{total / 1000 * part / 4:.0f} ms", "middle" if part else "start")
    x, y = float(LEFT), 34 + LANE * len(lanes) + 18
    for kind in kinds:
        out.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{FILLS[kind]}"/>')
        text(x + 17, y, {CALL: "calling a step", WAIT: "waiting for results"}.get(kind, kind))
        x += 135
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="a recording of the profiler")
    options = parser.parse_args()
    try:
        if options.keep:
            write(cut(events(options.keep)), TRACE)
        PICTURE.write_text(draw(read(TRACE)), encoding="utf-8")
    except Problem as problem:
        print(problem, file=sys.stderr)
        return 1
    print(f"{PICTURE.relative_to(HERE.parents[1])}: {len(read(TRACE))} bars")
    return 0
