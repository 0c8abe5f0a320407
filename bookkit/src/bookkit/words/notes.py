"""Small notes above text that a translated page shows in English, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bookkit.words.catalogues import State, has_words

NOTE_WORDS: dict[State, str] = {
    "stale": "This passage has not been updated yet.",
    "missing": "This passage has not been translated yet.",
}

# At the top of a page whose English was rewritten, instead of notes all over it.
NOTE_ON_TOP = "The English of this page has changed: what is not translated yet is in English."


class Notes:
    """Asked for one text of a page after the other. Neighbours in the same state share a note."""

    def __init__(self, states: Mapping[str, State], words: Callable[[str], str] = str) -> None:
        self.states, self.words = states, words
        self.last: State = "translated"

    def above(self, text: str, heading: bool = False) -> str:
        """The note for this text, or "" if it needs none."""
        if not has_words(text):
            return ""
        state = self.states.get(text, "translated")
        fresh, self.last = heading or state != self.last, state
        return self.words(NOTE_WORDS[state]) if fresh and state in NOTE_WORDS else ""
