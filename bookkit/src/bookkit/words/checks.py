"""What a translated message must keep of its English, and how it must be written.

`unlike_english` compares a translation with its English: links, code, formulas, placeholders,
numbers, and the Markdown that both come to. `Style` has a language's own rules,
locale/LANGUAGE/terms.toml, and finds words and punctuation against them. Both yield findings,
"number: 7 is not in the English"; a person decides.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.dollarmath import dollarmath_plugin

from bookkit.model.book import Problem
from bookkit.words.notebooks import ALERT, MARKDOWN

PLAIN = MarkdownIt("zero").enable("backticks").use(dollarmath_plugin)  # comments and drawings
URL = re.compile(r"https?://[^\s<>()\[\]（）「」，。、；：]+")
PLACEHOLDER = re.compile(r"\{\w*\}|%\(\w+\)[sd]|%[sd]\b")
TEX_WORDS = re.compile(r"\\text\{([^{}]*)\}")  # what of a formula is translated
TEX_TOKEN = re.compile(r"\\(?:[A-Za-z]+|.)|\S")
CODE, MATH, EMPHASIS = "\ue000", "\ue001", "\ue002"  # in `as_signs`


def tokens(text: str, markdown: bool) -> Iterator[Token]:
    """The tokens of a message, and those inside its lines."""

    def each(found: Sequence[Token]) -> Iterator[Token]:
        for token in found:
            yield token
            yield from each(token.children or ())

    yield from each((MARKDOWN if markdown else PLAIN).parse(ALERT.sub("", text, count=1)))


def is_formula(text: str) -> bool:
    """Is this what stands between $$ and $$, on lines of its own?"""
    return text.startswith("\n") or any(
        token.type == "text" and re.search(r"\\[A-Za-z]", token.content)
        for token in tokens(text, True)
    )


def without_words(formula: str) -> str:
    return TEX_WORDS.sub(r"\\text{}", formula).strip()


def as_signs(text: str, markdown: bool = True) -> str:
    """What is read: code and formulas are one sign each, and so is each end of emphasis."""
    if markdown and is_formula(text):
        return "\n".join(words.strip() for words in TEX_WORDS.findall(text))
    found = ""
    for token in tokens(text, markdown):
        match token.type:
            case "text":
                found += token.content
            case "softbreak" | "hardbreak":
                found += " "
            case "code_inline" | "fence" | "code_block":
                found += CODE
            case kind if kind.startswith("math"):
                found += MATH
            case "em_open" | "em_close" | "strong_open" | "strong_close":
                found += EMPHASIS
            case kind if kind.endswith("_close") and kind != "link_close":
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
SMALL = {str(value) for value in range(13)}  # may stand for once, pair or December
HAN_DIGITS = dict(zip("零〇一二兩三四五六七八九", (0, 0, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9)))
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}  # powers of 10
HAN_SCALES = {"百": 2, "千": 3, "萬": 4, "億": 8, "兆": 12}
SCALE = re.compile("|".join([*SCALES, *HAN_SCALES]), re.I)
NUMBER = re.compile(rf"(\d+(?:[.,]\d+)*)((?:[ -]?(?:{SCALE.pattern}))*)", re.I)
WORD = rf"(?:{'|'.join([*VALUES, *SCALES])})s?"
COMPOUND = re.compile(rf"\b(?:{WORD}(?:[ -]{WORD})+|{'|'.join(SCALES)})\b", re.I)


def digits(text: str) -> set[str]:
    """12,345 is one number, 8,16 are two, 0.12.1 is a version; 1.46 million and 146 萬 are equal."""
    found = set()
    for number, scales in NUMBER.findall(text):
        power = sum((SCALES | HAN_SCALES)[scale.lower()] for scale in SCALE.findall(scales))
        one = re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", number)
        for part in [number.replace(",", "")] if one else number.split(","):
            scaled = power and part.count(".") < 2
            found.add(f"{Decimal(part).scaleb(power).normalize():f}" if scaled else part)
    return found


def named_numbers(text: str) -> set[str]:
    """The numbers that English words name.

    Numbers of several words, for example four billion or sixty-four, are left to the reader.
    """
    words = re.findall("[a-z]+", COMPOUND.sub("", text).lower())
    singular = [word if word in VALUES else re.sub("(?<=x)es$|s$", "", word) for word in words]
    return {str(VALUES[word]) for word in singular if word in VALUES}


def han_numbers(text: str) -> set[str]:
    """三, 十六 and 三十二, and each of their signs, which may be words of another meaning (一些)."""
    found = {HAN_DIGITS[sign] for sign in text if sign in HAN_DIGITS}
    one = f"[{''.join(HAN_DIGITS)}]?"
    for tens, units in re.findall(f"({one})十({one})", text):
        found.add(10 * HAN_DIGITS.get(tens, 1) + HAN_DIGITS.get(units, 0))
    return {str(value) for value in found}


def number_findings(english: str, translated: str, numerals: bool) -> Iterator[str]:
    """`numerals`: does the language write numbers with the signs of Chinese?"""
    old, new, han = digits(english), digits(translated), han_numbers(translated)
    named = named_numbers(english)
    for value in sorted(old - new - han):
        yield f"number: the English says {value}, the translation does not"
    for value in sorted(new - old - named - SMALL) if not COMPOUND.search(english) else ():
        yield f"number: {value} is not in the English"
    kept = named_numbers(translated)  # titles that stay English
    for value in sorted(named - {"0", "1", "2"} - new - han - kept) if numerals else ():
        yield f"number: the English says {value} in words, the translation does not"


# What a message consists of.

ADVICE = {
    "link": "keep every link, and its address as it is",
    "code": "keep what stands between backticks as it is",
    "formula": "keep formulas as they are, but for words in \\text{…}",
    "placeholder": "keep names in braces as they are",
    "HTML": "keep tags as they are; write &lt; for a mere <",
    "emphasis": "a closing mark after 。 needs a space after it, so better put 。 outside",
    "Markdown": "begin and end it as the English does (no 1. or - or # at its start)",
}


def kept_parts(text: str, markdown: bool) -> dict[str, Counter[str]]:
    """What a translation must have as often as its English has."""
    found = {kind: Counter[str]() for kind in ADVICE}
    for token in tokens(text, markdown):
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
            case "em_open" | "strong_open":
                found["emphasis"][f"{token.markup}…{token.markup}"] += 1
            case "text":
                found["placeholder"].update(PLACEHOLDER.findall(token.content))
                found["link"].update(url.rstrip(".,;:") for url in URL.findall(token.content))
                if markdown:  # a mark that does not close
                    found["emphasis"].update(re.findall(r"\*", token.content))
            case kind if kind.endswith("_open"):
                found["Markdown"][f"<{token.tag}>"] += 1
    return found


def unlike_english(
    english: str, translated: str, markdown: bool = True, numerals: bool = True
) -> Iterator[str]:
    """What a translation lost or changed. `markdown`: not for comments and drawings."""
    if markdown and is_formula(english):
        # Words may change their place in it: $A$ 的位元組數. No sign of it is lost or new.
        old, new = (
            {"formula": Counter(TEX_TOKEN.findall(without_words(text)))}
            for text in (english, translated)
        )
    else:
        old, new = kept_parts(english, markdown), kept_parts(translated, markdown)
    for kind, wanted in old.items():
        lost, extra = wanted - new[kind], new[kind] - wanted
        if kind == "code":  # a name of the English that the translation marks as code
            extra = Counter(one for one in extra if one not in english)
        what = [f"lacks {', '.join(lost)}"] if lost else []
        what += [f"has {', '.join(extra)}, which the English has not"] if extra else []
        if what:
            yield f"{kind}: the translation {' and '.join(what)}: {ADVICE[kind]}"
    yield from number_findings(
        as_signs(english, markdown), as_signs(translated, markdown), numerals
    )


# Words and punctuation.

HAN = r"[\u3400-\u9fff]"
LATIN = rf"[A-Za-z0-9{CODE}{MATH}]"
FULL = "，。；：！？「」『』（）、《》〈〉"
OPEN_SIGNS, CLOSE_SIGNS = "「『（《〈", "」』）》〉"
PAIRS = ("（）", "「」", "『』", "《》")
UNITS = r"(?:[KMGT]i?B|kB|ms|µs|ns|[kMG]Hz|[GTP]?FLOP)(?:/s)?"
PUNCTUATION = [  # (what is looked for in the text, links and emphasis taken away; what to do)
    (rf"{HAN}{LATIN}|{LATIN}{HAN}", "put a space between Chinese and Latin, code or formulas"),
    (rf"{HAN} {HAN}", "no space between Chinese signs, those of a link included"),
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
# Read with the signs of emphasis, which needs a space behind it if it ends in a sign.
BESIDE = (rf"(?<=[{FULL}]) | (?=[{FULL}])", "no space beside full-width signs")


@dataclass(frozen=True)
class Style:
    """The rules of one language: locale/LANGUAGE/terms.toml. Without that file, none."""

    terms: Sequence[dict[str, Any]] = ()  # each with chinese, english, never, unless
    simplified: str = ""  # signs that Big5 has, and that are simplified or variants all the same
    chinese: bool = False

    def words(self, text: str) -> Iterator[str]:
        for term in self.terms:
            left = re.sub(term["unless"], "\n", text) if "unless" in term else text
            for form in term.get("never", ()):
                for match in re.finditer(re.escape(form), left):
                    yield f"term: {form} in {around(match)}: {term['english']} is {term['chinese']}"
        for sign in dict.fromkeys(re.findall(HAN, text)) if self.chinese else ():
            if sign in self.simplified or not in_big5(sign):
                yield f"term: {sign} is no sign of traditional Chinese"

    def punctuation(self, english: str, text: str) -> Iterator[str]:
        """`text`: as `as_signs` gives it."""
        if not self.chinese or not re.search(HAN, text):
            return
        bare = text.replace(EMPHASIS, "")
        for read, (rule, advice) in ((text, BESIDE), *((bare, one) for one in PUNCTUATION)):
            for match in re.finditer(rule, read):
                yield f"punctuation: {around(match)}: {advice}"
        for pair in PAIRS:
            if bare.count(pair[0]) != bare.count(pair[1]):
                yield f"punctuation: {pair} do not come in pairs"
        if bare.endswith("。") and not re.search(r"[.:!?…]\W*$", as_signs(english)):
            yield "punctuation: 。 at the end, where the English has no full stop"


def around(match: re.Match[str]) -> str:
    """Where in a text something was found, for people to read."""
    text = match.string[max(0, match.start() - 8) : match.end() + 8]
    for sign, words in ((CODE, "`…`"), (MATH, "$…$"), (EMPHASIS, "*"), ("\n", " ")):
        text = text.replace(sign, words)
    return f"“{text}”"


def in_big5(sign: str) -> bool:
    try:
        sign.encode("cp950")
    except UnicodeEncodeError:
        return False
    return True


def read_style(path: Path) -> Style:
    if not path.exists():
        return Style()
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise Problem(f"{path.name} cannot be read: {error}. Correct that line.") from error
    return Style(data.get("term", ()), data.get("simplified", ""), data.get("chinese", False))
