"""What a translated message must keep of its English, and how it must be written.

`broken` compares a translation with its English: links, code, formulas, placeholders, numbers, and
the Markdown that both come to. `House` reads a language's own rules, locale/LANGUAGE/terms.toml,
and finds words and punctuation against them. Both only report; a person decides.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from markdown_it.token import Token

from bookkit.model.book import Problem
from bookkit.words.notebooks import ALERT, MARKDOWN

URL = re.compile(r"https?://[^\s<>()\[\]（）「」，。、；：]+")
PLACEHOLDER = re.compile(r"\{\w*\}|%\(\w+\)[sd]|%[sd]\b")
BETWEEN_DOLLARS = re.compile(r"\$(?=\S)([^$\n]+)(?<=\S)\$")  # where there is no Markdown to read it
TEX_WORDS = re.compile(r"\\text\{([^{}]*)\}")  # what of a formula is translated
TEX_TOKEN = re.compile(r"\\(?:[A-Za-z]+|.)|\S")
CODE, MATH, LINK, EMPHASIS = "\ue000", "\ue001", "\ue002", "\ue003"  # in `as_signs`


@dataclass(frozen=True)
class Remark:
    check: str  # number, link, term, …
    what: str  # what is wrong, and what to do


def tokens(text: str) -> Iterator[Token]:
    """The tokens of a message, what stands inside its lines too."""

    def each(found: Sequence[Token]) -> Iterator[Token]:
        for token in found:
            yield token
            yield from each(token.children or ())

    yield from each(MARKDOWN.parse(ALERT.sub("", text, count=1)))


def is_formula(text: str) -> bool:
    """Is this what stands between $$ and $$, on lines of its own?"""
    return text.startswith("\n") or any(
        token.type == "text" and re.search(r"\\[A-Za-z]", token.content) for token in tokens(text)
    )


def without_words(formula: str) -> str:
    return TEX_WORDS.sub(r"\\text{}", formula).strip()


def as_signs(text: str, markdown: bool = True) -> str:
    """What is read: code and formulas are one sign each, so are borders of links and emphasis."""
    if not markdown:
        return PLACEHOLDER.sub(CODE, BETWEEN_DOLLARS.sub(MATH, re.sub(r"`[^`]*`", CODE, text)))
    if is_formula(text):
        return "\n".join(words.strip() for words in TEX_WORDS.findall(text))
    found = ""
    for token in tokens(text):
        match token.type:
            case "text":
                found += token.content
            case "softbreak" | "hardbreak":
                found += " "
            case "code_inline" | "fence" | "code_block":
                found += CODE
            case kind if kind.startswith("math"):
                found += MATH
            case "link_open" | "link_close":
                found += LINK
            case "em_open" | "em_close" | "strong_open" | "strong_close":
                found += EMPHASIS
            case kind if kind.endswith("_close"):
                found += "\n"
    return PLACEHOLDER.sub(CODE, found).strip("\n")


# Numbers.

WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
    fifteen sixteen seventeen eighteen nineteen""".split()
VALUES = {word: value for value, word in enumerate(WORDS)}
VALUES |= {
    word: 10 * value
    for value, word in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), 2)
}
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}  # powers of 10
# Words that may become digits in a translation, and need not: (twice: 2 倍, 兩次, 加倍).
PARTS = "first second third fourth fifth sixth seventh eighth ninth tenth".split()
MONTHS = """january february march april may june july august september october november
    december""".split()
LOOSE = {word: {value, 1} for value, word in enumerate(PARTS, 1)}
LOOSE |= {word: {value} for value, word in enumerate(MONTHS, 1)}
LOOSE |= dict.fromkeys("a an every each once single alone".split(), {1})
LOOSE |= dict.fromkeys("both pair twice double doubled".split(), {2})
LOOSE |= dict.fromkeys("half halve halved".split(), {1, 2})
LOOSE |= {"quarter": {1, 4}, "sixteenth": {1, 16}, "dozen": {12}, "triple": {3}, "quadruple": {4}}
DIGITS = r"\d+(?:[.,]\d+)*"
NUMBER = rf"(?:{'|'.join([*VALUES, *SCALES])})(?:es|s)?\b"
ENGLISH = re.compile(
    rf"({DIGITS})(?:[ -]({'|'.join(SCALES)})s?\b)?|\b({NUMBER}(?:[ -]{NUMBER})*)|([a-z]+)", re.I
)
HAN_DIGITS = dict(zip("零〇一二兩三四五六七八九", (0, 0, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9)))
HAN_SCALES = {"十": 1, "百": 2, "千": 3, "萬": 4, "億": 8, "兆": 12}  # powers of 10
HAN_NUMERAL = f"[{''.join(HAN_DIGITS)}{''.join(HAN_SCALES)}]"
CHINESE = re.compile(rf"({DIGITS})(?:\s?([百千萬億兆]+))?|({HAN_NUMERAL}+)")


@dataclass
class Numbers:
    """The numbers of a text. `digits` and `words` by how often; `loose` may be either, or neither."""

    digits: Counter[str] = field(default_factory=Counter)
    words: Counter[str] = field(default_factory=Counter)
    loose: set[str] = field(default_factory=set)
    compound: bool = False  # has it numbers of several words, which are not read?


def in_digits(text: str, power: int = 0) -> Iterator[str]:
    """12,345 is one number, 8,16 are two, 0.12.1 is a version; 1.46 million is 1460000."""
    parts = [text.replace(",", "")]
    if not re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", text):
        parts = text.split(",")
    for part in parts:
        scaled = power and part.count(".") < 2
        yield f"{Decimal(part).scaleb(power).normalize():f}" if scaled else part


def english_numbers(text: str) -> Numbers:
    """Numbers of several words, four billion or sixty-four, are left to the reader."""
    found = Numbers()
    for digits, scale, number, word in ENGLISH.findall(text):
        if digits:
            found.digits.update(in_digits(digits, SCALES.get(scale.lower(), 0)))
        elif number:
            name = number.lower()
            name = next((one for one in (name, name[:-1], name[:-2]) if one in VALUES), "")
            found.words.update([str(VALUES[name])] if name else ())
            found.compound |= not name
        singular = word.lower().removesuffix("s")
        found.loose.update(map(str, LOOSE.get(singular, ())))
    return found


def han_value(text: str) -> int:
    """四十億 is 4000000000; 二〇二六 is 2026."""
    if not any(sign in HAN_SCALES for sign in text):
        return int("".join(str(HAN_DIGITS[sign]) for sign in text))
    total = section = digit = 0
    for sign in text:
        if sign in HAN_DIGITS:
            digit = HAN_DIGITS[sign]
        elif HAN_SCALES[sign] < 4:
            section, digit = section + (digit or 1) * 10 ** HAN_SCALES[sign], 0
        else:
            total, section, digit = (total + section + digit) * 10 ** HAN_SCALES[sign], 0, 0
    return total + section + digit


def translated_numbers(text: str) -> Numbers:
    """Digits, 40 億, and Chinese numerals; the last may be words of another meaning (一些)."""
    found = Numbers()
    for digits, scales, numeral in CHINESE.findall(text):
        if digits:
            found.digits.update(in_digits(digits, sum(HAN_SCALES[sign] for sign in scales)))
        else:
            found.words[str(han_value(numeral))] += 1
            if len(numeral) > 1:
                found.words.update(str(HAN_DIGITS[one]) for one in numeral if one in HAN_DIGITS)
    return found


def number_findings(english: str, translated: str, numerals: bool) -> Iterator[Remark]:
    """`numerals`: does the language spell numbers as this module reads them?"""
    old, new = english_numbers(english), translated_numbers(translated)
    for value, count in (old.digits - new.digits).items():
        if new.words[value] < count:
            yield Remark("number", f"the English says {value}, the translation does not")
    for value in () if old.compound else new.digits:
        if value not in {*old.digits, *old.words, *old.loose}:
            yield Remark("number", f"{value} is not in the English")
    kept = english_numbers(translated).words if numerals else {}  # titles that stay English
    for value in old.words if numerals else ():
        if int(value) > 2 and not (new.digits[value] or new.words[value] or kept[value]):
            yield Remark("number", f"the English says {value} in words, the translation does not")


# What a message consists of.

ADVICE = {
    "link": "keep every link, and its address as it is",
    "code": "keep what stands between backticks as it is",
    "formula": "keep what stands between dollar signs as it is, but for words in \\text{…}",
    "placeholder": "keep names in braces as they are",
    "HTML": "keep tags as they are; write &lt; for a mere <",
}


def kept_parts(text: str, markdown: bool) -> dict[str, Counter[str]]:
    """What a translation must have as often as its English has."""
    if not markdown:
        bare = re.sub(r"`[^`]*`", CODE, text)
        return {
            "link": Counter(URL.findall(text)),
            "code": Counter(re.findall(r"`([^`]*)`", text)),
            "formula": Counter(map(without_words, BETWEEN_DOLLARS.findall(bare))),
            "placeholder": Counter(PLACEHOLDER.findall(BETWEEN_DOLLARS.sub(MATH, bare))),
        }
    found = {kind: Counter[str]() for kind in ADVICE}
    for token in tokens(text):
        match token.type:
            case "link_open":
                found["link"][str(token.attrs["href"])] += 1
            case "image":
                found["link"][str(token.attrs["src"])] += 1
            case "code_inline" | "fence" | "code_block":
                found["code"][token.content.strip()] += 1
            case kind if kind.startswith("math") and not kind.endswith("_close"):
                found["formula"][without_words(token.content)] += 1
            case "html_inline" | "html_block":
                found["HTML"][token.content] += 1
            case "text":
                found["placeholder"].update(PLACEHOLDER.findall(token.content))
                found["link"].update(url.rstrip(".,;:") for url in URL.findall(token.content))
    return found


def shape(text: str) -> tuple[list[str], Counter[str], int]:
    """Blocks in order, emphasis as it renders, and stars that are shown as stars."""
    blocks = [token.type for token in MARKDOWN.parse(ALERT.sub("", text, count=1))]
    every = list(tokens(text))
    emphasis = Counter(token.type for token in every if token.type in ("em_open", "strong_open"))
    stars = sum(token.content.count("*") for token in every if token.type == "text")
    return blocks, emphasis, stars


def unlike_english(
    english: str, translated: str, markdown: bool = True, numerals: bool = True
) -> Iterator[Remark]:
    """What a translation lost or changed. `markdown`: not for comments and drawings."""
    if markdown and is_formula(english):
        # Words may change their place in it: $A$ 的位元組數. No sign of it is lost or new.
        was, now = (Counter(TEX_TOKEN.findall(without_words(one))) for one in (english, translated))
        words = [len(TEX_WORDS.findall(one)) for one in (english, translated)]
        if now != was or words[0] != words[1]:
            what = "this is a formula: copy the English, and translate what stands in \\text{…}"
            yield Remark("formula", what)
        yield from number_findings(as_signs(english), as_signs(translated), numerals)
        return
    old, new = kept_parts(english, markdown), kept_parts(translated, markdown)
    for kind, wanted in old.items():
        lost, extra = wanted - new[kind], new[kind] - wanted
        if kind == "code":  # a name of the English that the translation marks as code
            extra = Counter({one: count for one, count in extra.items() if one not in english})
        if lost or extra:
            said = [f"lacks {', '.join(lost)}"] * bool(lost)
            said += [f"has {', '.join(extra)}, which the English has not"] * bool(extra)
            yield Remark(kind, f"the translation {' and '.join(said)}: {ADVICE[kind]}")
    yield from number_findings(
        as_signs(english, markdown), as_signs(translated, markdown), numerals
    )
    if markdown:
        old_shape, new_shape = shape(english), shape(translated)
        if old_shape[0] != new_shape[0]:
            new_blocks = ", ".join(kind for kind in new_shape[0] if kind.endswith("_open"))
            yield Remark(
                "Markdown",
                f"the translation becomes {new_blocks or 'nothing'}, not what the English is: "
                "begin and end it as the English does (no 1. or - or # at its start)",
            )
        for kind, mark in (("strong_open", "**"), ("em_open", "*")):
            if old_shape[1][kind] != new_shape[1][kind]:
                yield Remark(
                    "emphasis",
                    f"{mark}…{mark} renders {new_shape[1][kind]} times, "
                    f"in the English {old_shape[1][kind]}: "
                    "a closing mark after 。 needs a space or the end of the line after it; "
                    "better put 。 outside",
                )
        if old_shape[2] != new_shape[2]:
            yield Remark("emphasis", "a * is shown as a star: see which mark does not close")


# Words and punctuation.

HAN = r"[\u3400-\u9fff]"
LATIN = rf"[A-Za-z0-9{CODE}{MATH}]"
FULL = "，。；：！？「」『』（）、《》〈〉"
OPEN_SIGNS, CLOSE_SIGNS = "「『（《〈", "」』）》〉"
PAIRS = ("（）", "「」", "『』", "《》")
UNITS = r"(?:[KMGT]i?B|kB|ms|µs|ns|[kMG]Hz|[GTP]?FLOP)(?:/s)?"
PUNCTUATION = [  # (what is looked for in the plain text without borders, what to do)
    (rf"{HAN}{LATIN}|{LATIN}{HAN}", "put a space between Chinese and Latin, code or formulas"),
    (
        rf"[{HAN[1:-1]}{CLOSE_SIGNS}]\s*[,;:!?]|[,;:!?]\s*[{HAN[1:-1]}{OPEN_SIGNS}]",
        "write ，；：！？ in Chinese",
    ),
    (rf"{HAN}\.(?!\w)", "write 。 in Chinese"),
    (rf"\({HAN}|{HAN}\)|{HAN}\(|\){HAN}|\([^()]*）|（[^（）]*\)", "write （） in Chinese"),
    (r"[“”‘’]", "quote with 「」"),
    (rf'"{HAN}[^"]*"', "quote with 「」"),
    (r"\d\s+%|％", "write 90%, without a space"),
    (rf"\d{UNITS}\b", "put a space before the unit"),
    (r"(?<!—)—(?!—)", "write the dash as ——"),
    (rf"(?<!…)…(?!…)|{HAN}\.\.\.|\.\.\.{HAN}", "write the ellipsis as ……"),
]
OFTEN = 3  # a page that uses a term as often as that prints its English beside it once
BESIDE = rf"(?<=[{FULL}]) | (?=[{FULL}])"
COLON = r"[:;](?=\s|$)"  # after Latin letters too, **FSDP**：8 個裝置
# Titles and names, if they have no Chinese.
FOREIGN = re.compile(rf"{LINK}[^{LINK}]*{LINK}|[（(][^（）()]*[）)]")


@dataclass(frozen=True)
class Term:
    chinese: str
    english: str
    never: tuple[str, ...]  # forms that are wrong here
    unless: str  # a regular expression around them that is right
    first: bool  # a page prints its English beside it


@dataclass(frozen=True)
class House:
    """The rules of one language: locale/LANGUAGE/terms.toml. Without that file, none."""

    terms: tuple[Term, ...] = ()
    simplified: str = ""  # signs that Big5 has, and that are simplified or variants all the same
    chinese: bool = False
    exceptions: tuple[Mapping[str, str], ...] = ()
    path: Path | None = None

    def words(self, text: str) -> Iterator[Remark]:
        for term in self.terms:
            for form in term.never:
                for match in re.finditer(re.escape(form), text):
                    ok = any(
                        span.start() <= match.start() and match.end() <= span.end()
                        for span in (re.finditer(term.unless, text) if term.unless else ())
                    )
                    if not ok:
                        around = text[max(0, match.start() - 8) : match.end() + 8]
                        yield Remark(
                            "term",
                            f"{form} in “{legible(around)}”: {term.english} is {term.chinese}",
                        )
        if self.chinese:
            for sign in dict.fromkeys(re.findall(HAN, text)):
                if sign in self.simplified or not in_big5(sign):
                    yield Remark("term", f"{sign} is no sign of traditional Chinese")

    def punctuation(self, english: str, text: str) -> Iterator[Remark]:
        """`text`: as `as_signs` gives it."""
        if not self.chinese or not re.search(HAN, text):
            return
        # A border of a link or of emphasis is nothing to a space: what stands at it counts.
        emphasised = text.replace(LINK, "")
        bare = emphasised.replace(EMPHASIS, "")
        for read, rule, advice in (
            *((bare, rule, advice) for rule, advice in PUNCTUATION),
            (bare, rf"{HAN} {HAN}", "no space between Chinese signs, those of a link included"),
            # Emphasis that ends in a sign needs a space after it, or it does not render.
            (emphasised, BESIDE, "no space beside full-width signs"),
            (emphasised, rf"[。，：；]{EMPHASIS} ", "put the sign outside: **…**。接著"),
            (without_foreign(text), COLON, "write ：； in Chinese"),
        ):
            for match in re.finditer(rule, read):
                around = read[max(0, match.start() - 8) : match.end() + 8]
                yield Remark("punctuation", f"“{legible(around)}”: {advice}")
        for pair in PAIRS:
            if bare.count(pair[0]) != bare.count(pair[1]):
                yield Remark("punctuation", f"{pair} do not come in pairs")
        if bare.endswith("。") and not re.search(r"[.:!?…]\W*$", as_signs(english)):
            yield Remark("punctuation", "。 at the end, where the English has no full stop")


def without_foreign(text: str) -> str:
    """`text` without the links and brackets that have no Chinese: titles keep their own colons."""

    def kept(match: re.Match[str]) -> str:
        return match[0] if re.search(HAN, match[0]) else CODE

    return FOREIGN.sub(kept, text).replace(LINK, "").replace(EMPHASIS, "")


def legible(text: str) -> str:
    for sign, words in ((CODE, "`…`"), (MATH, "$…$"), (LINK, "|"), (EMPHASIS, "*")):
        text = text.replace(sign, words)
    return text.replace("\n", " ")


def in_big5(sign: str) -> bool:
    try:
        sign.encode("cp950")
    except UnicodeEncodeError:
        return False
    return True


def without_english(
    terms: Sequence[Term], prose: Sequence[str], page: Sequence[str]
) -> Iterator[tuple[Remark, int]]:
    """Terms that a page uses often and never with their English; the number of the first in `prose`.

    Texts are as `as_signs` gives them; `page` has headings and lists too.
    """
    read = [re.sub(f"[{LINK}{EMPHASIS}]", "", text) for text in page]
    for term in terms:
        uses = [number for number, text in enumerate(prose) if term.chinese in text]
        beside = re.compile(
            rf"{re.escape(term.chinese)}{HAN}{{0,2}}（[^（）]*{re.escape(term.english)}", re.I
        )
        if term.first and len(uses) >= OFTEN and not any(map(beside.search, read)):
            what = (
                f"{term.chinese}, {len(uses)} times on the page, and never with its English: "
                f"write {term.chinese}（{term.english}） where it comes first"
            )
            yield Remark("English", what), uses[0]


def read_house(path: Path) -> House:
    if not path.exists():
        return House()
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise Problem(f"{path.name} cannot be read: {error}. Mend that line.") from error
    terms = tuple(
        Term(
            one["chinese"],
            one["english"],
            tuple(one.get("never", ())),
            one.get("unless", ""),
            one.get("first", False),
        )
        for one in data.get("term", ())
    )
    exceptions = tuple(data.get("exception", ()))
    for one in exceptions:
        if set(one) != {"page", "check", "text", "reason"}:
            raise Problem(f"{path.name}: an exception has page, check, text and reason: {one}")
    return House(
        terms, data.get("simplified", ""), bool(data.get("chinese", False)), exceptions, path
    )
