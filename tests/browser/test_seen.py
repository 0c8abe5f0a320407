"""Each check of survey.py has something to say of a page that has every fault."""

import pytest

import survey as survey_module
from chromium import serving
from survey import survey

GOOD = """<!DOCTYPE html><html lang="en" data-theme="light"><head><title>A page</title><link rel="icon" href="data:,">
<meta name="viewport" content="width=device-width"><style>
  :root { --ink: black } [data-theme=dark] { @media screen { --ink: white; background: black } } body, a { color: var(--ink) }
  @media print { details::details-content { content-visibility: visible } .topbar { display: none } }
</style></head><body><header class="topbar">Bar</header><main>
<h1 id="top">A page</h1><p><a href="#top">Up</a></p>
<details><summary>More</summary><p>text</p></details></main></body></html>"""

FAULTS = {  # name: (what to replace, by what, what is said)
    "console": ("</main>", "</main><script>console.error('oh')</script>", "console: oh"),
    "script": ("</main>", "</main><script>nothing()</script>", "error in a script: nothing is not defined"),
    "host": ("</main>", "<img src='https://example.com/a.png' alt=''></main>", "asks another host: https://example.com/a.png"),
    "wide": ("</main>", "<p style='width: 700px'>x</p></main>", "px wider than a window of 360 px, folds closed"),
    "wide fold": ("<p>text", "<p style='width: 700px'>x", "px wider than a window of 360 px, folds open"),
    "image": ("</main>", "<img src='none.png' alt=''></main>", "none.png does not load"),
    "anchor": ('href="#top"', 'href="#none"', "#none leads nowhere"),
    "hidden anchor": ('<h1 id="top"', '<h1>A page</h1><p hidden id="top"', "#top leads to something hidden"),
    "covered anchor": ('<header class="topbar">Bar', "<style>main {padding-bottom: 2000px} .topbar {position: fixed; height: 90px}"
                       '</style><header class="topbar">Bar', "#top is hidden by the bar at the top"),
    "twice": ("<p><a", '<p id="top"><a', "id 'top' is there twice"),
    "untitled fold": ("More", "", "has no title"),
    "fold without keys": ("<details>", "<details onkeydown='event.preventDefault()'>", "'More' does not follow the Enter key"),
    "fold without focus": ("<details>", "<style>:focus-visible {outline: none}</style><details>", "'More' does not show that it has"),
    "no button": ("</main>", "<div class='cell_input'><div class='highlight'><pre>x = 1</pre></div></div></main>", "no button to copy"),
    "wrong copy": ("</main>", "<div class='highlight'><pre>x = 1</pre><button class='copy' "
                   "onclick='navigator.clipboard.writeText(2)'>copy</button></div></main>", "the button copies '2'"),
    "print fold": ("details::details-content { content-visibility: visible }", "", "print leaves out what is folded under 'More'"),
    "print frame": (".topbar { display: none }", "", "print shows .topbar"),
    "print dark": ("@media screen { --ink: white; background: black }", "--ink: white; background: black",
                   "print from the dark scheme has other colours: --ink"),
    "axe": ("</main>", "<img src='data:image/gif;base64,R0lGODlhAQABAAAAACw='></main>", "axe image-alt"),
    "light": ("--ink: black", "--ink: #ddd", "in light: axe color-contrast"),
    "dark": ("--ink: white", "--ink: #333", "in dark: axe color-contrast"),
    "code": ("</main>", "<pre><span class='k'>if</span><span class='k' style='color: #eee'>if</span></pre></main>", "axe color-contrast"),
}  # fmt: skip


@pytest.fixture(scope="module")
def found(browsing, tmp_path_factory):
    """What is said of each faulty page, and of the good one."""
    run, browser = browsing
    folder = tmp_path_factory.mktemp("pages")
    (folder / "good.html").write_text(GOOD)
    names = {"": "good.html"}
    for number, (name, (old, new, _)) in enumerate(FAULTS.items()):
        assert GOOD.count(old) == 1, name
        names[name] = f"{number}.html"
        (folder / names[name]).write_text(GOOD.replace(old, new))
    with serving(folder) as site, pytest.MonkeyPatch.context() as patch:
        patch.setattr(survey_module, "PAGES_PRESSED", len(names))
        said = run(survey(browser, site, names.values()))
    return {name: said[file] for name, file in names.items()}


def test_a_good_page_is_left_alone(found):
    assert found[""] == []


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_seen(name, found):
    assert any(FAULTS[name][2] in what for what in found[name]), found[name]


@pytest.mark.parametrize(
    ("when", "said"),
    [("true", ["the page did not answer for 6 seconds, twice"]), ("!localStorage.seen", [])],
)
def test_a_page_that_never_answers_is_visited_once_more(
    browsing, tmp_path, monkeypatch, when, said
):
    """Playwright waits for what a script promises as long as that takes."""
    monkeypatch.setattr(survey_module, "LONGEST", 6)
    script = f"if ({when}) window.MathJax = {{startup: {{promise: new Promise(() => 0)}}}}; localStorage.seen = 1"
    (tmp_path / "a.html").write_text(GOOD.replace("</main>", f"</main><script>{script}</script>"))
    run, browser = browsing
    with serving(tmp_path) as site:
        assert run(survey(browser, site, ["a.html"])) == {"a.html": said}
