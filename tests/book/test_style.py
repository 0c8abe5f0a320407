"""House style that a machine can check: sizes of cells, words, pictures, and a chapter's anatomy."""
import re
import statistics

from bookkit.lint.prose import blocks, headings, read_aloud, sentences, words
from rules import BOOK, over_chapters, rule

COLUMNS, LINES = 88, 30
BANNED = {
    r"simply|just|obviously|clearly|of course|easily": "tells the reader how it should feel",
    r"(?i:behaviors?|colors?|neighbors?|favor|center(?:s|ed)?|labeled|labeling|modeling"
    r"|analyz\w+|initializ(?!er)\w+|parallelize\w*|utiliz\w+|organiz\w+|recogniz\w+|summariz\w+"
    r"|memoriz\w+|penaliz\w+|emphasiz\w+|minimiz\w+|maximiz\w+|realiz\w+)":
        "is spelled the American way: the book writes colour, behaviour, initialise",
}
# Words of the field and of the instruments' names keep their spelling.
SPELLED_SO = re.compile(r"(?i)^(rematerializ|materializ|normaliz|optimiz|serializ)")


def cells_of_code(chapter):
    return [cell for cell in chapter.code if "setup" not in cell.tags]


# Cells.

@rule
def narrow_lines(chapter):
    for cell in chapter.code:
        limit = 100 if "setup" in cell.tags else COLUMNS
        for number, line in enumerate(cell.lines, 1):
            if len(line) > limit:
                yield f"{cell.where}, line {number}: {len(line)} columns; break it before {limit}"


@rule
def short_cells(chapter):
    cells = cells_of_code(chapter)
    for cell in cells:
        if len(cell.lines) > LINES:
            yield f"{cell.where}: {len(cell.lines)} lines; split it, {LINES} are the limit"
    lengths = sorted(len(cell.lines) for cell in cells)
    if lengths and statistics.median(lengths) > 5:
        yield (f"book/{chapter.name}.md: the median cell has {statistics.median(lengths)} lines; "
               "5 are the limit: one idea in each cell")
    long = [cell for cell in cells if len(cell.lines) > 15]
    if cells and len(long) > len(cells) / 10:
        yield (f"book/{chapter.name}.md: {len(long)} of {len(cells)} cells have more than 15 lines "
               f"(cells {', '.join(str(cell.index) for cell in long)}); a tenth may")


@rule
def few_cells(chapter):
    if len(chapter.code) > 45:
        yield f"book/{chapter.name}.md: {len(chapter.code)} code cells; 45 are the limit"
    timing = [cell for cell in chapter.code if "timing" in cell.tags]
    if len(timing) > 2:
        yield f"{timing[2].where}: a third cell tagged timing; a chapter may have two"


@rule
def plain_python(chapter):
    for cell in chapter.code:
        try:
            compile(cell.source, cell.where, "exec")
        except SyntaxError as error:
            yield (f"{cell.where}, line {error.lineno}: not plain Python ({error.msg}); magics and "
                   "shell lines do not run everywhere")


KNOWN_TAGS = re.compile(r"setup|hide-cell|hide-input|hide-output|raises-exception|timing|mesh"
                        r"|fixed-mesh|predict|predicted"
                        r"|(?:shared|exercise|check|solution)-[a-zA-Z_]\w*")


@rule
def known_tags(chapter):
    for cell in chapter.cells:
        for tag in cell.tags:
            if not KNOWN_TAGS.fullmatch(tag):
                yield f"{cell.where}: no check knows the tag {tag!r}; see tests/test_style.py"


# Prose.

def prose(chapter):
    for cell in chapter.markdown:
        for kind, text, _, _ in blocks(cell.source):
            yield cell, kind, text


@rule
def enough_words(chapter):
    count = sum(len(words(text)) for _, _, text in prose(chapter))
    if not 1500 <= count <= 3500:
        yield f"book/{chapter.name}.md: {count} words of prose; a chapter has 1,500 to 3,500"


@rule
def short_sentences(chapter):
    every = [(len(words(sentence)), sentence, cell) for cell, kind, text in prose(chapter)
             if kind in ("paragraph", "item", "alert") for sentence in sentences(text)]
    if every and (mean := statistics.mean(count for count, *_ in every)) > 20:
        count, sentence, cell = max(every, key=lambda entry: entry[0])
        yield (f"book/{chapter.name}.md: {mean:.1f} words in the average sentence; 20 are the "
               f"limit. The longest ({count}) is in cell {cell.index}: {sentence[:70]}…")
    for count, sentence, cell in every:
        if count > 45:
            yield f"{cell.where}: a sentence of {count} words; make two: {sentence[:70]}…"


@rule
def short_paragraphs(chapter):
    for cell, kind, text in prose(chapter):
        if kind in ("paragraph", "alert") and len(sentences(text)) > 4:
            yield (f"{cell.where}: {len(sentences(text))} sentences in the paragraph "
                   f"\"{read_aloud(text)[:50]}…\"; 4 are the limit")


@rule
def plain_words(chapter):
    for cell, _, text in prose(chapter):
        for pattern, why in BANNED.items():
            for found in re.finditer(rf"(?i:\b(?:{pattern})\b)", read_aloud(text)):
                if not SPELLED_SO.match(found[0]):
                    yield f"{cell.where}: \"{found[0]}\" {why}; use another word"


@rule
def layout_is_memory(chapter):
    for cell, _, text in prose(chapter):
        for sentence in sentences(text):
            if re.search(r"(?i)\blayouts?\b", sentence) and "memory" not in sentence:
                yield (f"{cell.where}: \"layout\" means order in memory in JAX; write sharding or "
                       f"strategy: {sentence[:60]}")


@rule
def headings_in_sentence_case(chapter):
    names = {"JAX", "Flax", "NNX", "Auto", "Explicit", "Manual", "Orbax", "Adam", "AdamW", "Colab",
             "Python", "CPU", "GPU", "TPU", "FSDP", "Megatron", "Linen", "XLA", "SPMD", "I", "A",
             "MLP", "HLO", "PRNG", "ZeRO", "RNG", "Optax", "API"}
    for cell in chapter.markdown:
        for _, text in headings(cell.source):
            if text.rstrip().endswith((".", ":")):
                yield f"{cell.where}: the heading \"{text}\" ends with a point; take it away"
            rest = re.split(r"(?<=[:?!])\s", read_aloud(text))
            for part in rest:
                capital = [word for word in re.findall(r"[A-Za-z][\w-]*", part)[1:]
                           if word[0].isupper() and not word.isupper() and word not in names]
                if capital:
                    yield (f"{cell.where}: the heading \"{text}\" has capitals in the middle "
                           f"({', '.join(capital)}); headings are in sentence case")


# Pictures.

@rule
def alt_text(chapter):
    for cell in chapter.markdown:
        pictures = re.findall(r"!\[([^\]]*)\]\(([^)\s]*)", cell.source)
        pictures += [(re.search(r"\balt=[\"']([^\"']*)", tag, re.I), tag)
                     for tag in re.findall(r"<img\b[^>]*>", cell.source, re.I)]
        for alt, source in pictures:
            alt = alt if isinstance(alt, str) else alt[1] if alt else ""
            if source.endswith("/colab-badge.svg") and alt == "Open in Colab":
                continue
            yield from bad_alt(alt, f"{cell.where}: the picture {source[:60]}")


def bad_alt(alt, what):
    if not alt.strip():
        yield f"{what} has no alt text; say what it shows, its axes and the conclusion"
    elif re.search(r"\.(?:svg|png|jpe?g|gif|webp)$", alt.strip(), re.I) or "/" in alt.split()[0]:
        yield f"{what} has a file name as alt text ({alt!r}); say what it shows"
    elif len(alt.split()) < 4:
        yield f"{what} has the alt text {alt!r}; say what it shows, its axes and the conclusion"


# Anatomy.

def addresses(name):
    """(Colab, page) of a chapter on the published site."""
    return BOOK.colab_url(f"book/{name}"), BOOK.page_url(f"book/{name}")


@rule
def opening(chapter):
    first = chapter.cells[0]
    if first.kind != "markdown" or not re.match(r"# \S", first.source):
        yield f"{first.where}: a chapter begins with a Markdown cell and `# Its title`"
        return
    colab, page = addresses(chapter.name)
    lines = [line for line in first.lines if line.strip()]
    badge = lines[1] if len(lines) > 1 else ""
    if f"]({colab})" not in badge or f"]({page})" not in badge or "colab-badge.svg" not in badge:
        yield (f"{first.where}: the line after the title holds the Colab badge, linked to {colab}, "
               f"and a link to {page}")
    texts = [text for _, text, _, tag in blocks(first.source)]
    if not any(re.fullmatch(r"\*\*(?!You (?:will|need)\b)[^*].*\*\*", text, re.S) for text in texts):
        yield f"{first.where}: the question and its answer stand on top, one bold paragraph"
    for phrase in ("You will", "You need"):
        if not re.search(rf"\*\*{phrase}\b", first.source, re.I):
            yield f"{first.where}: no **{phrase}** on top"
    if found := re.search(r"\*\*You will\b.*?\n\n?((?:\s*[-*] .*\n(?:  .*\n)*)+)",
                          first.source + "\n", re.I):
        count = len(re.findall(r"(?m)^\s*[-*] ", found[1]))
        if count > 4:
            yield f"{first.where}: {count} verbs under **You will**; 4 are the limit"


@rule
def setup_is_second(chapter):
    second = chapter.cells[1] if len(chapter.cells) > 1 else chapter.cells[0]
    if second.kind != "code" or set(second.tags) != {"setup", "hide-cell"}:
        yield f"{second.where}: the second cell is the setup cell, tagged setup and hide-cell"
    elif second.metadata.get("cellView") != "form":
        yield f"{second.where}: the setup cell needs `:cellView: form`, so that Colab folds it"
    for cell in chapter.code[1:]:
        if "setup" in cell.tags:
            yield f"{cell.where}: a second setup cell; one is enough"


def section(chapter, pattern):
    """The Markdown below the heading that matches, up to the next one of its level; or None."""
    text = "\n\n".join(cell.source for cell in chapter.markdown)
    found = re.search(rf"(?mi)^(#+) [^\n]*(?:{pattern})[^\n]*$", text)
    if not found:
        return None
    rest = text[found.end():]
    end = re.search(rf"(?m)^#{{1,{len(found[1])}}} ", rest)
    return rest[:end.start()] if end else rest


@rule
def closing(chapter):
    takeaways = section(chapter, r"take[ -]?aways?")
    if takeaways is None:
        yield f"book/{chapter.name}.md: no heading Takeaways"
    else:
        count = len(re.findall(r"(?m)^(?:[-*]|\d+\.) ", takeaways))
        if not 1 <= count <= 5:
            yield f"book/{chapter.name}.md: {count} takeaways in a list; 1 to 5 belong there"
    if section(chapter, "exercises?") is None:
        yield f"book/{chapter.name}.md: no heading Exercises"
    if section(chapter, "in practice") is None:
        yield f"book/{chapter.name}.md: no heading In practice"
    if section(chapter, "further reading") is None:
        yield f"book/{chapter.name}.md: no heading Further reading"


test_style = over_chapters(__name__)
