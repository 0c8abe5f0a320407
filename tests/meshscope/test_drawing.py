"""What a drawing says is read back from its SVG and its text, and compared with the
shards of real arrays. Nothing here calls the code that places or draws blocks."""

import collections
import math
import re
import xml.etree.ElementTree as ET

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from effort import examples
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshscope as ms

NAMES = ("data", "model", "fsdp", "stage", "rows", "Y")
SVG = "{http://www.w3.org/2000/svg}"


# Readers. A drawing as boxes: {device label: ((start, stop), …) by dimension}.


def words(element):
    return "".join(element.itertext()).replace("\xa0", " ")


def number(element, *names):
    return [float(element.get(name)) for name in names]


class Picture:
    """Visible things of one SVG: blocks, ids, bars, numbers and lines of text."""

    def __init__(self, svg):
        self.root = ET.fromstring(svg)
        self.blocks, self.bars, self.texts = [], [], collections.defaultdict(list)
        for group in [self.root, *self.root.iter(f"{SVG}g")]:
            kind = (group.get("class") or "").removeprefix("ms-")
            for rect in group.findall(f"{SVG}rect"):
                box = number(rect, "x", "y", "width", "height")
                if kind == "blocks":
                    self.blocks.append(box)
                elif kind != "chips":
                    self.bars.append((*box, group.get("fill")))
            for text in group.findall(f"{SVG}text"):
                self.texts[kind].append((*number(text, "x", "y"), words(text)))

    def labels(self, block):
        x, y, w, h = block
        inside = [t for t in self.texts["ids"] if x <= t[0] <= x + w and y <= t[1] <= y + h]
        return [label for at_x, at_y, label in sorted(inside, key=lambda t: (t[1], t[0]))]

    def lines(self):
        return [text for _, _, text in sorted(self.texts[""], key=lambda t: t[1])]


SIZE = r"(?:dim (?P<dim>\d+): )?(?P<size>\d+)(?P<over>(?: ÷ [^÷=]+)*)(?: = (?P<part>\d+))?"


def read_dimension(text):
    """'dim 1: 16 ÷ model(4) = 4' -> (1, 16, [('model', 4)], 4)."""
    found = re.fullmatch(SIZE, text)
    over = re.findall(r"÷ (?:(\w+)\((\d+)\)|(\d+))", found["over"])
    axes = [(name, int(size or bare)) for name, size, bare in over]
    size = int(found["size"])
    part = int(found["part"] or size)
    assert size == part * math.prod(n for _, n in axes)
    return int(found["dim"] or -1), size, axes, part


def split_of(lines, rank):
    """{dimension: (size, axes)} as stated: numbered, or the rows' line before the columns'."""
    read = enumerate(map(read_dimension, lines))
    stated = {dim if rank > 2 else n: (size, axes) for n, (dim, size, axes, _) in read}
    assert sorted(stated) == list(range(rank))
    return stated


def leading(panel_name):
    """'dim 0 [0:4] stage 1' -> {0: (0, 4)}."""
    return {
        int(d): (int(a), int(b)) for d, a, b in re.findall(r"dim (\d+) \[(\d+):(\d+)\]", panel_name)
    }


def panel_of(picture, y):
    names = [t for t in picture.texts["panel"] if t[1] < y]
    return max(names, key=lambda t: t[1])[2] if names else ""


def span(at, long, peers, size):
    """Elements that a block spans, from its place in the row of its peers."""
    starts = sorted(set(peers))
    gap = starts[1][0] - sum(starts[0]) if len(starts) > 1 else 0
    first, whole = starts[0][0], sum(starts[-1]) + gap - starts[0][0]
    return round((at - first) / whole * size), round((at + long + gap - first) / whole * size)


def read_svg(drawing, rank):
    """(boxes by device label, stated dimensions, the picture)."""
    picture = Picture(drawing.svg)
    side_text = collections.defaultdict(list)
    for _, y, text in sorted(picture.texts["side"], key=lambda t: t[1]):
        side_text[panel_of(picture, y)].append(text)
    sides = {" ".join(lines) for lines in side_text.values()}
    assert len(sides) <= 1, "every panel has the same rows"
    tops = [t for t in picture.lines() if re.fullmatch(SIZE, t)]
    stated = split_of([*sides, *tops], rank)
    grid = list(range(rank))
    if rank > 2:
        grid = [read_dimension(t)[0] for t in [*sides, tops[-1]]]
    boxes = collections.defaultdict(list)
    for block in picture.blocks:
        x, y, w, h = block
        panel = panel_of(picture, y)
        peers = [b for b in picture.blocks if panel_of(picture, b[1]) == panel]
        box = {d: (0, size) for d, (size, _) in stated.items()} | leading(panel)
        if rank:
            box[grid[-1]] = span(x, w, [(b[0], b[2]) for b in peers], stated[grid[-1]][0])
        if rank > 1:
            box[grid[0]] = span(y, h, [(b[1], b[3]) for b in peers], stated[grid[0]][0])
        for label in picture.labels(block):
            boxes[label].append(tuple(box[d] for d in range(rank)))
        check_numbers(picture, block, panel, [box[d] for d in grid])
    return boxes, stated, picture


def check_numbers(picture, block, panel, ends):
    """The numbers at a block's edges are where the block begins and ends."""
    x, y, w, h = block
    marks = [m for m in picture.texts["marks"] if panel_of(picture, m[1]) == panel]
    left = min(b[0] for b in picture.blocks)
    top = min(b[1] for b in picture.blocks if panel_of(picture, b[1]) == panel)
    above = {int(text): at for at, row, text in marks if row < top and text}
    beside = {int(text): row - 3.5 for at, row, text in marks if at < left and row > top and text}
    for (start, stop), seen, at in zip(ends[::-1], (above, beside), ((x, x + w), (y, y + h))):
        assert seen[start] == pytest.approx(at[0], abs=6) if start in seen else len(seen) > 4
        assert seen[stop] == pytest.approx(at[1], abs=6) if stop in seen else len(seen) > 4


def read_text(drawing, rank):
    """(boxes by device label, stated dimensions) from the box-drawing characters."""
    lines = drawing.text.split("\n")
    blocks, panel, tops, sides = [], "", {}, set()
    n = 0
    while n < len(lines):
        if re.match(r"dim \d+ \[", lines[n]):
            panel = lines[n]
        elif re.fullmatch(SIZE, lines[n].strip()):
            tops[lines[n].strip()] = True
        if "┌" not in lines[n]:
            n += 1
            continue
        cuts = [i for i, c in enumerate(lines[n]) if c in "┌┬┐"]
        columns = [(0, 0)] * (len(cuts) - 1)
        if rank:
            ticks = {m.start(): int(m[0]) for m in re.finditer(r"\d+", lines[n - 1])}
            assert list(ticks) == cuts, "a number stands at every cut"
            columns = list(zip(ticks.values(), list(ticks.values())[1:]))
        margin, held, rows, start = [], [], (0, 0), 0
        while n < len(lines) and lines[n][cuts[0] : cuts[0] + 1] in tuple("┌├│└"):
            before, joint = lines[n][: cuts[0]], lines[n][cuts[0]]
            at = re.search(r"(\d*) $", before) if rank > 1 else None
            margin.append(before[: at.start()].strip() if at else "")
            if joint == "│":
                held = [lines[n][a + 1 : b].split() for a, b in zip(cuts, cuts[1:])]
            elif at:
                rows = (start, start := int(at[1]))
            if joint in "├└":
                for column, labels in zip(columns, held):
                    box = [rows] * (rank > 1) + [column] * (rank > 0)
                    blocks += [(label, panel, box) for label in labels]
            n += 1
        while n < len(lines) and re.fullmatch(r"÷ .*|= \d+", lines[n]):
            margin.append(lines[n])  # the words on the left may reach below the blocks
            n += 1
        sides.add(" ".join(filter(None, margin)))
    assert len(sides) == 1, "every panel has the same rows"
    sides -= {""}
    stated = split_of([*sides, *tops], rank)
    grid = list(range(rank))
    if rank > 2:
        grid = [read_dimension(t)[0] for t in [*sides, list(tops)[-1]]]
    boxes = collections.defaultdict(list)
    for label, panel, ends in blocks:
        box = {d: (0, size) for d, (size, _) in stated.items()}
        box |= leading(panel) | dict(zip(grid, ends))
        boxes[label].append(tuple(box[d] for d in range(rank)))
    return boxes, stated


# The truth, from the array itself.


def shards(x):
    boxes = {}
    for shard in x.addressable_shards:
        box = tuple(s.indices(n)[:2] for s, n in zip(shard.index, x.shape))
        boxes[str(shard.device.id)] = [box]
    return boxes


def moved_dimensions(x, mesh, axis):
    """Dimensions whose part changes as one walks along a mesh axis, from the shards."""
    boxes = shards(x)
    along = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0)
    moved = set()
    for line in along.reshape(along.shape[0], -1).T:
        for device in line[1:]:
            pair = boxes[str(line[0].id)][0], boxes[str(device.id)][0]
            moved |= {d for d, (a, b) in enumerate(zip(*pair)) if a != b}
    return moved


@st.composite
def arrays(draw):
    """A real array on a random mesh of the eight devices, under a random spec."""
    sizes = draw(
        st.lists(st.sampled_from([1, 2, 2, 4, 8]), min_size=1, max_size=3).filter(
            lambda s: math.prod(s) <= 8
        )
    )
    names = draw(st.permutations(NAMES))[: len(sizes)]
    order = draw(st.permutations(range(8)))[: math.prod(sizes)]
    devices = np.array(jax.devices())[order].reshape(sizes)
    kind = draw(st.sampled_from([AxisType.Auto, AxisType.Explicit]))
    mesh = Mesh(devices, tuple(names), axis_types=(kind,) * len(sizes))
    rank = draw(st.integers(0, 4))
    parts = [[] for _ in range(rank)]
    if rank:
        for name in draw(st.permutations(names)):
            dim = draw(st.integers(-1, rank - 1))
            if dim >= 0:
                parts[dim].append(name)
    spec = [None if not p else p[0] if len(p) == 1 else tuple(p) for p in parts]
    while spec and spec[-1] is None and draw(st.booleans()):
        spec.pop()
    shape = [draw(st.integers(1, 3)) * math.prod(mesh.shape[a] for a in p) for p in parts]
    x = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    return jax.device_put(x, NamedSharding(mesh, P(*spec))), x, mesh


EXAMPLES = hypothesis.settings(max_examples=examples(250), deadline=None, derandomize=True)


def check(drawing, x, host):
    """Both renderings give every device the box that its shard has, and its data."""
    truth = shards(x)
    from_svg, stated, picture = read_svg(drawing, x.ndim)
    from_text, stated_in_text = read_text(drawing, x.ndim)
    assert dict(from_svg) == truth
    assert dict(from_text) == truth
    assert stated == stated_in_text
    assert [stated[d][0] for d in range(x.ndim)] == list(x.shape)
    for shard in x.addressable_shards:
        (box,) = from_svg[str(shard.device.id)]
        cut = host[tuple(slice(*ends) for ends in box)]
        np.testing.assert_array_equal(np.asarray(shard.data), cut)
    local = {shard.data.shape for shard in x.addressable_shards}
    said = re.search(r"^each device: (.*)$", drawing.text, re.MULTILINE)[1]
    assert [said] == ["×".join(map(str, s)) or "scalar" for s in local]
    return stated, picture


@EXAMPLES
@hypothesis.given(arrays())
def test_every_device_stands_in_the_block_it_holds(case):
    x, host, mesh = case
    stated, picture = check(ms.show(x), x, host)
    copied = re.search(r"copied over (.*)", ms.show(x).text)
    copied = dict(re.findall(r"(\w+)\((\d+)\)", copied[1])) if copied else {}
    for name, size in mesh.shape.items():
        named = {d for d, (_, axes) in stated.items() if name in dict(axes)}
        if size == 1:
            assert name not in copied
            continue
        assert named == moved_dimensions(x, mesh, name)
        assert (name in copied) == (not named)
        assert all(dict(axes).get(name, size) == size for _, axes in stated.values())
        assert copied.get(name, str(size)) == str(size)
    copies = collections.Counter(box[0] for box in shards(x).values())
    assert set(copies.values()) == {math.prod(map(int, copied.values()))}


@EXAMPLES
@hypothesis.given(arrays())
def test_a_bar_covers_the_blocks_of_one_coordinate_of_its_axis(case):
    x, _, mesh = case
    _, _, picture = read_svg(ms.show(x), x.ndim)
    where = {str(d.id): i for i, d in np.ndenumerate(mesh.devices)}
    colours = colours_of(mesh.axis_names)
    assert len(set(colours.values())) == len(mesh.axis_names), "one colour each"
    axes = {fill: mesh.axis_names.index(a) for a, fill in colours.items()}
    seen = collections.defaultdict(set)
    for x0, y0, w, h, fill in picture.bars:
        if fill == "currentColor":
            continue
        under = [
            b
            for b in picture.blocks
            if (x0 <= b[0] + b[2] / 2 <= x0 + w if w > h else y0 <= b[1] + b[3] / 2 <= y0 + h)
        ]
        if w > h and picture.texts["panel"]:
            panels = {panel_of(picture, y0 + 8)}
            under = [b for b in under if panel_of(picture, b[1]) in panels]
        held = [where[label][axes[fill]] for b in under for label in picture.labels(b)]
        assert len(set(held)) == 1, (fill, held)
        seen[fill].add(held[0])
    for fill, coordinates in seen.items():
        assert coordinates == set(range(mesh.devices.shape[axes[fill]]))


def colours_of(names):
    """Fill of each axis, from how a drawing of a mesh writes its name."""
    picture = Picture(ms.show(AbstractMesh((2,) * len(names), tuple(names))).svg)
    spans = {t.text: t.get("fill") for t in picture.root.iter(f"{SVG}tspan")}
    return {name: re.search(r"var\([^)]*\)", spans[name])[0] for name in names}


@EXAMPLES
@hypothesis.given(arrays())
def test_a_mesh_shows_each_device_at_its_coordinates(case):
    _, _, mesh = case
    drawing = ms.show(mesh)
    picture = Picture(drawing.svg)
    seen = {}
    for block in picture.blocks:
        panel = panel_of(picture, block[1])
        peers = [b for b in picture.blocks if panel_of(picture, b[1]) == panel]
        rows, columns = (sorted({b[i] for b in peers}) for i in (1, 0))
        at = [int(n) for n in re.findall(r" (\d+)", panel)]
        at += [rows.index(block[1])] * (mesh.devices.ndim > 1)
        seen[(*at, columns.index(block[0]))] = picture.labels(block)
    split = {i for i, n in enumerate(mesh.devices.shape) if n > 1}
    truth = {i: [str(d.id)] for i, d in np.ndenumerate(mesh.devices)}
    # Where an axis of size 1 takes the place of a grid edge, the order is the same.
    assert list(seen.values()) == list(truth.values())
    if len(split) == mesh.devices.ndim:
        assert seen == truth
    for name, size in mesh.shape.items():
        assert f"{name}({size})" in drawing.text.replace("\n", " ")
        assert f"{name}({size})" in "".join(words(t) for t in picture.root.iter(f"{SVG}text"))
    rows = [line.split("│", 1)[1] for line in drawing.text.split("\n") if "│" in line]
    assert [int(i) for i in re.findall(r"\d+", " ".join(rows))] == [d.id for d in mesh.devices.flat]
