"""The timeline of chapter 4 is what the tool draws from the committed trace, and shows what it holds."""

import gzip
import re

from draw import PICTURE, TRACE, Bar, cut, draw, read


def op(name, start, length, device="0"):
    return {
        "ph": "X",
        "name": name,
        "ts": start,
        "dur": length,
        "args": {"hlo_op": name, "device_ordinal": device},
    }


def test_picture_is_drawn_from_the_trace():
    assert PICTURE.read_text("utf-8") == draw(read(TRACE)), "run `python book/traces/draw.py`"
    assert TRACE.stat().st_size < 200_000


def test_trace_holds_three_calls_and_eight_devices():
    bars = read(TRACE)
    assert {bar.lane for bar in bars} == {"Python", *map(str, range(8))}
    calls = [bar for bar in bars if bar.what == "call"]
    end = max(bar.start + bar.length for bar in bars)
    assert len(calls) == 3 and calls[-1].start + calls[-1].length < end / 10


def test_no_paths_in_the_trace():
    assert not re.search(r"[/\\]", gzip.decompress(TRACE.read_bytes()).decode())


def test_cut():
    """Instructions by device and kind; loops around them left out; neighbours joined."""
    bars = cut(
        [
            op("while.1", 100, 50),
            op("dot.2", 101, 10),
            op("fusion.3", 112, 10),
            op("all-gather.4", 130, 20),
            op("dot.9", 135, 4, "1"),
            {"ph": "X", "name": "PjitFunction(f)", "ts": 90, "dur": 30},
            {"ph": "X", "name": "$/home/me/x.py:7 f", "ts": 91, "dur": 3},
        ]
    )
    assert bars == [
        Bar("0", "compute", 11, 21),
        Bar("0", "all-gather", 40, 20),
        Bar("1", "compute", 45, 4),
        Bar("Python", "call", 0, 30),
    ]
