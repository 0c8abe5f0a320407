"""The rule of pages that say what a message means: an entry is whole, and quotes what was raised."""

from __future__ import annotations

import ast
import re

from bookkit.lint.form import tree_of
from bookkit.lint.outputs import outputs, text_of_output
from bookkit.lint.rules import REFERENCE, Page, Said, rule
from bookkit.model.addresses import addresses
from bookkit.model.entries import Section, lessons, sections

THREAD = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull|discussions)/\d+")


@rule(REFERENCE)
def message_entries(page: Page) -> Said:
    """Each entry of messages-*: message, id, proof, a chapter, a thread; its words were raised."""
    if not page.chapter.name.startswith("messages-"):
        return
    for entry in filter(lambda one: one.is_entry, sections(page.chapter)):
        if not entry.messages:
            yield entry.line, "an entry is called by its message: quote it in code form"
        if not entry.slug:
            yield entry.line, "its first cell gives the entry its address: tag it id-SLUG"
        if not any(cell.is_proof for cell in entry.code):
            yield entry.line, "no strip: a proof that this is raised, and that the fix is right"
        if not lessons(page.book, entry):
            yield entry.line, "no link to what teaches it: name a chapter, with its address"
        if not any(THREAD.match(url) for url in addresses(entry.text)):
            yield entry.line, "no link to a public thread where it was met: name one"
        evidence = seen_in(page, entry)
        for fragment in entry.fragments:
            if "".join(fragment.split()) not in evidence:
                how = "quote the message, with … for what varies, or assert it in the strip"
                yield entry.line, f"{fragment!r} stands in no output and no strip: {how}"


def seen_in(page: Page, entry: Section) -> str:
    """What its cells printed, and every string of its proofs, without the blanks."""
    own = {id(cell) for cell in entry.code}
    texts = [text_of_output(output) for cell, output in outputs(page) if id(cell) in own]
    for cell in entry.code:
        if cell.is_proof:
            strings = (node for node in ast.walk(tree_of(cell)) if isinstance(node, ast.Constant))
            texts += [str(node.value) for node in strings if isinstance(node.value, str)]
    return "\n".join("".join(text.split()) for text in texts)
