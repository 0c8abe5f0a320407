"""Search results show titles as readers know them, code and angle brackets included."""

from pathlib import Path

import pytest
import sphinx

from built import BOOK

TOOLS = Path(sphinx.__file__).parent / "themes" / "basic" / "static" / "searchtools.js"
PAGE = """<p id="search-progress"></p><script>
const Documentation = {}, DOCUMENTATION_OPTIONS = {}, SPHINX_HIGHLIGHT_ENABLED = false;
const _ready = () => {}, stopwords = [], Stemmer = class { stemWord(word) { return word; } };
</script>"""
# As Sphinx stores them: a page's title is HTML, a heading is text.
INDEX = {
    "docnames": ["book/messages/messages-shard-map"],
    "filenames": ["book/messages/messages-shard-map.md"],
    "titles": [
        'What does <code class="literal"><span class="pre">shard_map</span></code> &lt;say&gt;?'
    ],
    "alltitles": {
        "What does shard_map <say>?": [[0, "what"]],
        "TypeError: got <class 'int'> for axis": [[0, "typeerror"]],
        "Some donated buffers were not usable, or no warning": [[0, "not-usable"]],
        "sharding passed should be specified, formerly cannot reshape array": [[0, "no-target"]],
    },
    "terms": {},
    "titleterms": {"doe": 0, "shard_map": 0, "what": 0},
    "objects": {},
    "objnames": {},
    "objtypes": {},
    "indexentries": {},
}
TITLE = "What does shard_map <say>?"
ENTRY = f"{TITLE} > TypeError: got <class 'int'> for axis"
UNUSABLE = f"{TITLE} > Some donated buffers were not usable, or no warning"
TARGET = f"{TITLE} > sharding passed should be specified, formerly cannot reshape array"


@pytest.mark.parametrize(
    "query, title",
    [
        ("what does shard_map", TITLE),
        ("got <class 'int'> for", ENTRY),
        ("shard_map", TITLE),
        ("UserWarning: Some donated buffers were not usable: float32[8,16]", UNUSABLE),
        ("ValueError: sharding passed should be specified, concrete and", TARGET),
        ("ValueError: cannot reshape array of size 2 into shape (1,64)", TARGET),
    ],
)
def test_a_result_is_called_by_its_title_as_text(browsing, query, title):
    run, browser = browsing

    async def shown():
        page = await browser.new_page()
        await page.set_content(PAGE)
        await page.add_script_tag(path=TOOLS)
        await page.add_script_tag(path=BOOK.root / "site" / "static" / "search.js")
        result = await page.evaluate(
            """([index, query]) => {
              Search.setIndex(index);
              const link = document.createElement("a"), asked = Search._parseQuery(query);
              link.innerHTML = Search._performSearch(...asked).at(-1)[1];  // as Sphinx shows it
              return link.textContent;
            }""",
            [INDEX, query],
        )
        await page.close()
        return result

    assert run(shown()) == title
