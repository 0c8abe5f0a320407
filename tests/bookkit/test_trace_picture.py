"""The timeline of 04a-train-checks is what the tool draws from the committed trace, and shows what it holds."""

import gzip
import re

from draw import PICTURE, TRACE, draw, read


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
