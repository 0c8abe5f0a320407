"""Published addresses: the list only grows, the check names what broke, and what moved leads on."""
import shutil

import pytest

from bookkit.model.book import Book, Problem
from bookkit.site import anchors, redirects
from toy import ROOT

PAGE = """<html><head><title>{title} - Toy</title></head><body><aside id="outside"></aside><main class="text" id="main">
<section id="{first}"><span id="id1"></span>
<h1>{title} with <code>x</code><a class="headerlink" href="#{first}">#</a></h1>
<section id="second"><h2>Second<a class="headerlink" href="#second">#</a></h2></section>
<details id="checked-sum"><summary>Checked</summary></details>
<dl><dt id="term-mesh">mesh</dt></dl><svg><g id="drawn"/></svg></section></main></body></html>"""


@pytest.fixture
def book(tmp_path):
    shutil.copyfile(ROOT / "_config.yml", tmp_path / "_config.yml")
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: book/00-intro\nchapters:\n  - file: book/01-toy\n")
    (tmp_path / "site").mkdir()
    for folder in ("", "zh-TW/"):
        pages = tmp_path / "_build" / "html" / folder / "book"
        pages.mkdir(parents=True)
        (pages / "00-intro.html").write_text(PAGE.format(title="Intro", first="intro"))
        (pages / "01-toy.html").write_text(PAGE.format(title="A toy", first="a-toy"))
    return Book(tmp_path)


def site(book):
    return book.root / "_build" / "html"


def said(book, *arguments):
    return anchors.main(list(arguments), book.root)


def redirect(book, **moved):
    lines = [f'"book/{old}" = "book/{new}"' for old, new in moved["moved"].items()]
    (book.root / redirects.REDIRECTS).write_text("\n".join(lines))


def test_the_list_has_what_others_may_link_to_and_only_grows(book, capsys):
    assert said(book) == 0 and "lacks 10, such as book/00-intro.html" in capsys.readouterr().out
    assert said(book, "--complete") == 1
    assert said(book, "--update") == 0
    listed = anchors.published(book)
    assert [line for line in listed if "00-intro" in line] == [
        f"book/00-intro.html{name}" for name in ("", "#checked-sum", "#intro", "#second", "#term-mesh")]
    (site(book) / "book/01-toy.html").write_text(PAGE.format(title="A toy", first="a-game"))
    said(book, "--update")
    assert set(anchors.published(book)) == {*listed, "book/01-toy.html#a-game"}
    assert said(book, "--complete") == 1  # for what is gone


def test_an_anchor_that_is_gone_is_named_with_a_guess(book, capsys):
    said(book, "--update")
    for folder in ("zh-TW/", ""):  # first in one language alone, then in both
        (site(book) / folder / "book/01-toy.html").write_text(PAGE.format(title="A toy", first="a-toy-runs"))
        capsys.readouterr()
        assert said(book) == 1
        out = capsys.readouterr().out
        if folder:
            assert "01-toy.html#a-toy leads nowhere in zh_TW: pages have the same ids in all languages\n" in out
    assert "book/01-toy.html#a-toy was published and leads nowhere: add to site/redirects.toml\n" in out
    assert '\n    "book/01-toy.html#a-toy" = "book/01-toy.html#a-toy-runs"\n' in out


def test_a_guess_prefers_the_same_name_elsewhere_and_then_a_like_one():
    now = ["book/a.html", "book/a.html#the-ring", "book/b.html", "book/b.html#mesh"]
    assert anchors.nearest("book/a.html#mesh", now) == "book/b.html#mesh"
    assert anchors.nearest("book/a.html#a-ring", now) == "book/a.html#the-ring"
    assert anchors.nearest("book/a.html#zzz", now) == "book/a.html"
    assert anchors.nearest("book/gone.html#zzz", now) == "book/a.html"


def test_what_moved_leads_on_and_the_check_is_content(book, capsys):
    said(book, "--update")
    (book.root / anchors.LIST).open("a").write(
        "".join(f"book/{one}\n" for one in ("01-toy.html#old", "01-toy.html#away", "01-toy.html#strip", "01-toy.html#term",
                                            "gone.html", "gone.html#second", "gone.html#first")))
    assert said(book) == 1 and capsys.readouterr().out.count("was published") == 7
    redirect(book, moved={
        "01-toy.html#old": "01-toy.html#a-toy", "01-toy.html#away": "00-intro.html#second",
        "01-toy.html#strip": "01-toy.html#checked-sum", "01-toy.html#term": "01-toy.html#term-mesh",
        "gone.html": "01-toy.html", "gone.html#first": "00-intro.html#intro"})
    redirects.honour(book, site(book))
    assert said(book) == 0
    for folder in ("", "zh-TW/"):
        page = (site(book) / folder / "book/01-toy.html").read_text()
        assert '<h1><span id="old"></span>A toy' in page  # in the heading, not before it
        assert '<span id="strip"></span><details id="checked-sum">' in page
        assert '<dt id="term-mesh"><span id="term"></span>' in page
        assert '<a href="00-intro.html#second">Second</a></p>\n</main>' in page and '<p class="moved" id="away">' in page
        moved = (site(book) / folder / "book/gone.html").read_text()
        assert '<noscript><meta http-equiv="refresh" content="0; url=01-toy.html">' in moved
        assert f'<link rel="canonical" href="{book.site}{folder}book/01-toy.html">' in moved
        assert '{"first": "00-intro.html#intro"}' in moved


@pytest.mark.parametrize("old, new, wrong", [
    ("01-toy.html#old", "01-toy.html#none", "leads to #none, which book/01-toy.html does not have"),
    ("01-toy.html#old", "02-none.html", "leads to book/02-none.html, which is no page of the site"),
    ("01-toy.html#second", "00-intro.html", '"book/01-toy.html#second" is there, it did not move'),
    ("01-toy.html", "00-intro.html", '"book/01-toy.html" is a page of the site: take the line out'),
    ("gone.html#x", "00-intro.html", "is on a page that is gone: say where book/gone.html went"),
])
def test_a_redirect_that_cannot_be_honoured_is_named(book, old, new, wrong):
    redirect(book, moved={old: new})
    with pytest.raises(Problem, match=r"site/redirects\.toml: ") as problem:
        redirects.honour(book, site(book))
    assert wrong in str(problem.value)


def test_a_redirect_leads_to_the_last_place_at_once(book):
    redirect(book, moved={"gone.html": "went.html", "went.html": "01-toy.html"})
    with pytest.raises(Problem, match="which moved too: name \"book/01-toy.html\""):
        redirects.honour(book, site(book))


def test_redirects_that_cannot_be_read_and_a_site_that_is_not_there(book):
    (book.root / redirects.REDIRECTS).write_text("a = ")
    with pytest.raises(Problem, match=r"site/redirects\.toml cannot be read"):
        redirects.read_redirects(book)
    shutil.rmtree(site(book))
    with pytest.raises(Problem, match="run `make site` first"):
        said(book)
