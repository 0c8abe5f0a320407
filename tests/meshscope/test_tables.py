"""What results look like in a terminal and in a notebook, and what their sentences carry as data."""

import ast
import html.parser
import json
import pathlib
import re
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshscope as ms
from meshscope import _messages
from meshscope._messages import MESSAGES, PLACE, Said, filled

SOURCE = pathlib.Path(ms.__file__).parent


def mesh_of(*sizes, names=("data", "model", "stage")):
    names = names[: len(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))


def shape(spec, *sizes, mesh=None, dtype="float32", kind=None):
    sharding = NamedSharding(mesh or mesh_of(2, 4), spec, memory_kind=kind)
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


def compiled(f, *inputs, out=None):
    out = NamedSharding(mesh_of(2, 4), out or P())
    return jax.jit(f, out_shardings=out).lower(*inputs).compile()


def results():
    """One of each kind of result, and of each thing that one may say."""
    w, b = shape(P("data", "model"), 8, 16), shape(P(), 16)
    yield ms.memory({"w": w, "b": b})
    yield ms.memory(w)
    yield ms.memory({"moments": shape(P("data"), 8, 16, kind="pinned_host"), "w": w})
    x = jax.device_put(np.ones((8, 16), np.float32), w.sharding) + 0
    yield ms.memory({"x": x, "tied": x, "one": jnp.ones(8)})
    x.delete()
    yield ms.memory(x)
    total = compiled(lambda w: w.sum(0), w)
    yield ms.memory(total)
    yield many(13)
    rows = ms.collectives(total)
    yield rows
    yield rows[:0]
    yield ms.collectives(total.as_text(), mesh_of(2, 4))
    yield rows.by("kind", "axes", "inside_loop", "source_line", "op_name", "within", "group_size")
    yield ms.diff(rows, rows)
    yield ms.diff(rows[:0], rows)
    yield ms.full_copies(total, {"w": shape(P("data"), 16)})
    yield ms.full_copies(compiled(lambda w: w * 2, w), {"w": w, "v": w})
    yield ms.full_copies(compiled(lambda w: w * 2, w, out=P("data")), w)
    a, b = shape(P("data"), 96, 80), shape(P("data"), 48, 80)
    yield ms.full_copies(compiled(lambda b: b * 2, b), {"a": a, "b": b})
    half = compiled(lambda w: w.sum(0), shape(P("data"), 16, 16, dtype="bfloat16"))
    yield ms.collectives(half)
    yield ms.collectives(half).by("kind")
    yield ms.collectives(half.as_text(), mesh_of(2, 4))
    yield ms.diff(total, half)
    stack = shape(P(None, "data"), 4, 96, 384)
    yield ms.full_copies(compiled(lambda s: s[0] * 2, stack), stack)


def drawings():
    """One of each kind of drawing, and of each thing that one may say."""
    cube = mesh_of(2, 2, 2)
    yield ms.show(mesh_of(2, 4), "a mesh")
    yield ms.show(cube)
    yield ms.show(AbstractMesh((4, 64), ("data", "model")))
    yield ms.show(shape(P(), 8, 16))
    yield ms.show(shape(P()), "one")
    yield ms.show(shape(P(("data", "model")), 8, 16, 4), "three")
    yield ms.show(shape(P("data", "model", "stage"), 8, 16, 4, mesh=cube))
    yield ms.show(shape(P("data", "model", "stage", None), 8, 16, 4, 2, mesh=cube))
    yield ms.show({"w": shape(P("data"), 8, 16), "b": shape(P("model"), 16)}, "parameters")
    yield ms.show({f"w{n:02}": shape(P("data"), 8, 16) for n in range(75)}, "many")
    yield ms.show({f"w{n:02}": shape(P("data"), 8, 16) for n in range(13)})
    yield ms.show(jnp.ones((4, 4)))
    yield ms.show(shape(P("data"), 8, 16, kind="pinned_host"))
    yield ms.show({f"w{n:02}": shape(P("data"), 8, 16, kind="pinned_host") for n in range(13)})
    big = AbstractMesh((4, 64), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    yield ms.show(((512, 512), NamedSharding(big, P("data", "model"))))
    explicit = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    mixed = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))
    seen = []
    note = lambda x: seen.append(ms.show(x)) or x  # noqa: E731
    rows = jax.device_put(np.ones((8, 16)), NamedSharding(explicit, P("data")))
    jax.jit(note)(rows)
    jax.jit(note)(jax.device_put(np.ones((8, 16)), NamedSharding(mixed, P("data"))))
    jax.shard_map(note, mesh=explicit, in_specs=P("data"), out_specs=P("data"))(rows)
    with jax.set_mesh(explicit):
        x = jax.device_put(np.ones((8, 16), np.float32), P(None, "model"))
        y = jax.device_put(np.ones((16, 8), np.float32), P("model", None))
        yield ms.show(jnp.dot(x, y, out_sharding=P(None, None, unreduced={"model"})))
        yield ms.show(
            jax.reshard(jax.device_put(np.ones((8, 16), np.float32), P()), P(reduced={"data"}))
        )
    yield from seen
    from jax._src.sharding_impls import GSPMDSharding  # only instances are public

    for spec in (P("data", "model", "stage"), P("data")):
        lost = NamedSharding(cube, spec)._to_xla_hlo_sharding(3)
        positional = GSPMDSharding(tuple(cube.devices.flat), lost)
        yield ms.show(jax.device_put(np.ones((8, 8, 8)), positional))


class Page(html.parser.HTMLParser):
    """Elements of a page: (tag, attributes, text), innermost first."""

    def __init__(self, markup):
        super().__init__()
        self.open, self.elements = [], []
        self.feed(markup)
        assert not self.open, "every element is closed"

    def handle_starttag(self, tag, attributes):
        self.open.append((tag, dict(attributes), []))

    def handle_data(self, data):
        for _, _, text in self.open:
            text.append(data)

    def handle_endtag(self, tag):
        name, attributes, text = self.open.pop()
        assert name == tag
        self.elements.append((tag, attributes, "".join(text)))

    def named(self, tag):
        return [(attributes, text) for name, attributes, text in self.elements if name == tag]


# Tables in a page


def many(count):
    return ms.memory({f"w{n:02}": shape(P("data"), 2 * (count - n), 16) for n in range(count)})


@pytest.mark.parametrize(("count", "shown"), [(1, 1), (10, 10), (12, 12), (13, 10), (60, 10)])
def test_the_first_rows_are_shown_and_the_rest_unfolds(count, shown):
    page = Page(many(count)._repr_html_())
    first, *rest = [text for _, text in page.named("tbody")]
    assert [f"w{n:02}" in first for n in range(count)] == [n < shown for n in range(count)]
    assert len(rest) == (count > shown)
    if rest:
        assert all(f"w{n:02}" in rest[0] for n in range(shown, count))
        assert [text for _, text in page.named("summary")] == [f"⋯ {count - shown} more rows"]
        inside = markup_of("details", many(count)._repr_html_())
        assert rest[0] in Page(inside).named("tbody")[0][1]
        assert inside.count("<th ") == 6, "the heads stand above the rest too"
    else:
        assert not page.named("details")
    assert len(page.named("tr")) == count + len([first, *rest])


def markup_of(tag, markup):
    return re.search(rf"<{tag}>(.*)</{tag}>", markup, re.S)[1]


def test_numbers_stand_right_in_a_page_and_in_a_terminal():
    told = ms.memory({"w": shape(P("data"), 8, 1600), "b": shape(P(), 16)})
    page = Page(told._repr_html_())
    right = [
        text for attributes, text in page.named("td") if attributes.get("class") == "ms-number"
    ]
    assert right == ["25,600", "64"]
    heads = [
        text for attributes, text in page.named("th") if attributes.get("class") == "ms-number"
    ]
    assert heads == ["bytes per device"]
    assert {attributes["scope"] for attributes, _ in page.named("th")} == {"col"}
    ends = {
        m.end()
        for line in repr(told).split("\n")[1:]
        for m in [re.search(r"(device|25,600|64)\b", line)]
    }
    assert len(ends) == 1


def test_lines_are_soft_and_colours_the_page_s():
    """Legible on white and on black without a style sheet of the site; a site can restyle."""
    for result in results():
        markup = result._repr_html_()
        assert markup.startswith('<div class="meshscope"><style>') and markup.endswith("</div>")
        assert not re.search(r' style="|black|#[0-9a-f]{3}|solid currentColor', markup)
        rules = dict(re.findall(r"([^{}]+)\{([^}]*)\}", markup_of("style", markup)))
        assert all(part.startswith(".meshscope ") for rule in rules for part in rule.split(","))
        every = ";".join(rules.values())
        assert "color:inherit" in every and "rgba(128,128,128,.3)" in every
        assert rules[".meshscope .ms-number"] == "text-align:right"
        assert set(re.findall(r"(?<![-\w])color:(\w+)", every)) == {"inherit"}


def test_names_are_text_not_markup():
    told = ms.memory({'<b> & "x"': shape(P("data"), 8)})
    page = Page(told._repr_html_())
    assert '<b> & "x"' in [text for _, text in page.named("td")] and not page.named("b")
    assert Page(ms.memory({"<w>": shape(P(), 8)})._repr_html_()).named("td")[0][1] == "<w>"


def test_a_result_without_rows_is_its_title():
    for result in results():
        if repr(result).count("\n") == 0:
            page = Page(result._repr_html_())
            assert [text for _, text in page.named("caption")] == [repr(result)]
            assert not page.named("tr") and not page.named("details")


def test_text_and_page_say_the_same():
    for result in results():
        page = Page(result._repr_html_())
        ((_, title),) = page.named("caption")
        above, lines = title.split("\n"), repr(result).split("\n")
        assert lines[: len(above)] == above
        assert len(page.named("br")) == len(above) - 1
        lines = lines[len(above) :]
        cells = [text for tag, _, text in page.elements if tag in ("td", "th")]
        if heads := page.named("details"):  # they stand above the rows that unfold, too
            again = [text for _, text in page.named("th")][len(page.named("th")) // 2 :]
            cells = [text for n, text in enumerate(cells) if text not in again or n < len(again)]
        assert "".join(cells).replace(" ", "") == "".join(lines).replace(" ", ""), heads
        assert not any(line != line.rstrip() for line in lines)


# Sentences as data


def check(attributes, text):
    """The text of an element that carries a message is that message, filled. Returns it."""
    if "data-message" not in attributes:
        return []
    message = attributes["data-message"]
    values = json.loads(attributes.get("data-values", "{}"))
    assert filled(message, values) == text, (message, values, text)
    return list(messages_of(message, values))


def messages_of(message, values):
    assert message in MESSAGES
    assert set(values) == set(PLACE.findall(message))
    yield message
    for value in values.values():
        if isinstance(value, list):
            yield from messages_of(*value)


NAMES = re.compile(  # what may stand without a message: names, numbers, types, specs, lines
    r"[-\d,.:×÷=⋯… \xa0–?]*|\w*\[[\d,]*\]|P\(.*\)( \{[UR]:\w+\})?|\([\d, ]*\)|\w+\.py:\d+|"
    r"jit\(.*|(all|reduce)-\w+(-\w+)?|float32|\w+Sharding|\d+ cpu devices|"
    r"(Abstract)?Mesh|Auto|Explicit|((÷|×) )?\w+\(\d+\)( (Auto|Explicit))?|\d+( ÷ (\w+\()?\d+\)?)*( = \d+)?|(data|model|stage|w|b|v|x|tied|one|moments|w\d\d)(, \w+)*|"
    r"arguments|outputs|temporaries|aliased|(data|model|stage) \d( (data|model|stage) \d)*"
)


def test_every_sentence_of_a_table_carries_its_message():
    found = set()
    for result in results():
        for tag, attributes, text in Page(result._repr_html_()).elements:
            if tag in ("caption", "th", "td", "summary"):
                found.update(check(attributes, text))
                assert "data-message" in attributes or NAMES.fullmatch(text), text
    assert {
        "{bytes} bytes per device; {unique} without copies, {total} on all devices",
        "A program given as text", "No difference", "Second program minus first", "deleted",
        "⋯ {count} more rows", "in {memory}", "{part}, {parts}", "the buffers of {path}",
        "one layer of {path}", "{path}, or a piece of {other}", "no", "{title}\n{note}",
        "CPU sends {types}", "If compiled for CPU, it sends {types}", "{dtype} as {wide} ({times} times the bytes)",
    } <= found  # fmt: skip


def test_every_sentence_of_a_drawing_carries_its_message():
    found = set()
    titles = {"a mesh", "one", "three", "parameters", "many"}
    for drawing in drawings():
        for svg in {drawing.svg, *drawing.pieces}:
            root = ET.fromstring(svg)
            found.update(check(root.attrib, root.get("aria-label")))
            assert "data-message" in root.attrib
            for text in root.iter("{http://www.w3.org/2000/svg}text"):
                words = "".join(text.itertext())
                found.update(check(text.attrib, words))
                known = "data-message" in text.attrib or words in titles
                assert known or NAMES.fullmatch(words.replace("\xa0", " ").split("  ")[0]), words
    assert {
        "{title}, {array}: {parts}", "{array}: {parts}", "{drawing}. {drawings}", "{axis} then {axes}",
        "in order {ids}", "in order {first} to {last}", "copied over {axes}", "copied × {count}",
        "reduced over {axes}", "partial sums over {axes}", "varying over {axes}",
        "left to the compiler over {axes}", "⋯ {count} of {all} not drawn", "each device: {shape}",
        "each device ({axes}): {shape}", "dim {dim}: {size}", "dim {dim} [{part}] {where}",
        "dim {dim} [{part}]", "Table", "⋯ {count} more leaves", "{title}, {count} leaves: {rows}",
        "dimension {dim} of size {size} split into {parts} of {each}", "in host memory ({memory})",
    } <= found  # fmt: skip


def test_a_message_that_is_not_in_the_list_is_no_message():
    with pytest.raises(KeyError, match="no such message"):
        Said("in order of appearance")
    assert len(set(MESSAGES)) == len(MESSAGES)
    # and each that is in the list is used: its words stand in a string somewhere else
    strings = {
        node.value
        for path in SOURCE.glob("*.py") if path.name != "_messages.py"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }  # fmt: skip
    built = {  # from a simpler one, at run time
        "dimension {dim} of size {size} split over {axes} into {parts} of {each}",
        "{bytes} bytes per device and {host} in host memory for a compiled program",
        "{bytes} bytes per device and {host} in host memory; {unique} without copies, {total} on all devices",
    }  # fmt: skip
    assert set(MESSAGES) - strings == built


def test_a_message_holds_coloured_lines_and_further_messages():
    where = Said("in {memory}", memory='a\'b "c" <d>')
    said = Said("{part}, {parts}", part=[("x", "x"), ("(2)", "")], parts=where)
    assert str(said) == 'x(2), in a\'b "c" <d>'
    assert said.line()[:2] == [("x", "x"), ("(2)", "")]
    element = ET.fromstring(f"<p{said.attributes()}/>")
    assert check(element.attrib, str(said)) == ["{part}, {parts}", "in {memory}"]
    assert _messages.html(where) == 'in a\'b "c" &lt;d&gt;'
    assert Said("yes").attributes() == ' data-message="yes"'
    assert _messages.attributes("plain") == _messages.attributes([("plain", "")]) == ""


def test_joining_folds_to_the_right():
    a, b, c = Said("sharded"), Said("deleted"), Said("one device")
    assert _messages.joined("{part}; {parts}", [a]) is a
    said = _messages.joined("{part}; {parts}", [a, b, c])
    assert str(said) == "sharded; deleted; one device"
    assert said.data() == ["{part}; {parts}", {"part": ["sharded", {}], "parts": [
        "{part}; {parts}", {"part": ["deleted", {}], "parts": ["one device", {}]}]}]  # fmt: skip
