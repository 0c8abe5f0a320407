"""Chinese search without a word segmenter: text and query are cut into pairs of characters.

分片規格 is indexed as 分片, 片規, 規格, and a search for 分片 or 規格 finds it. Latin words and
numbers stay whole. The JavaScript cuts a query as the Python cuts a page.
"""

import re

from sphinx.application import Sphinx
from sphinx.search import SearchLanguage

RUN = re.compile(r"[㐀-鿿]+|[^\W㐀-鿿]+")


class ChineseSearch(SearchLanguage):
    lang = "zh"
    language_name = "Chinese"
    stopwords: set[str] = set()
    js_stemmer_code = "var Stemmer = function () { this.stemWord = (word) => word; };"
    js_splitter_code = r"""
var splitQuery = (query) =>
  (query.match(/[㐀-鿿]+|(?:(?![㐀-鿿])[\p{L}\p{N}_])+/gu) || []).flatMap((run) =>
    /[㐀-鿿]/.test(run) && run.length > 2
      ? Array.from({length: run.length - 1}, (_, i) => run.slice(i, i + 2))
      : [run]).filter((piece) => piece.length > 1);
"""

    def split(self, input: str) -> list[str]:
        pieces: list[str] = []
        for run in RUN.findall(input):
            if "㐀" <= run[0] <= "鿿" and len(run) > 2:
                pieces += [run[i : i + 2] for i in range(len(run) - 1)]
            else:
                pieces.append(run)
        return pieces

    def stem(self, word: str) -> str:
        return word.lower()

    def word_filter(self, word: str) -> bool:
        return len(word) > 1


def setup(app: Sphinx) -> None:
    app.add_search_language(ChineseSearch)
