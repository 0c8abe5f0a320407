"""Links to other sites, tried on a server that is made up here."""

import http.server
import shutil
import threading

import pytest

from bookkit.model.book import Book, Problem
from bookkit.site import linkcheck
from toy import ROOT

pytestmark = pytest.mark.reads()  # a made-up book

ANSWERS = {"/good": 200, "/gone": 404, "/moved": 301, "/found": 302}


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        status = ANSWERS.get(self.path.split("?")[0], 200)
        self.send_response(status)
        if status in (301, 302):
            self.send_header("Location", "/good")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(b'<h1 id="there">Good</h1>')

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()


def book(folder, text):
    (folder / "site").symlink_to(ROOT / "site")
    for name in ("_config.yml", "conf.py"):
        shutil.copyfile(ROOT / name, folder / name)
    (folder / "_toc.yml").write_text("format: jb-book\nroot: book/00-intro\n", "utf-8")
    (folder / "book").mkdir()
    (folder / "book" / "00-intro.md").write_text(f"# Intro\n\n{text}\n", "utf-8")
    return Book(folder)


def test_what_leads_nowhere_is_named_with_its_page_and_line(tmp_path, server, capsys):
    own = Book().repo
    links = ["good", "good#there", "good#nowhere", "gone", "moved", "found"]
    text = "\n\n".join(f"[x]({server}/{link})" for link in links) + f"\n\n[own]({own}/blob/none)"
    with pytest.raises(Problem) as said:
        linkcheck.main([], book(tmp_path, text).root)
    message = str(said.value)
    assert f"book/00-intro.md:7: {server}/good#nowhere\n    broken: Anchor 'nowhere'" in message
    assert f"book/00-intro.md:9: {server}/gone\n    broken: 404" in message
    assert "2 of 6 links" in message and own not in message
    moved = capsys.readouterr().out
    assert f"{server}/moved\n    moved for good to {server}/good" in moved and "/found" not in moved


def test_good_links_pass(tmp_path, server, capsys):
    linkcheck.main([], book(tmp_path, f"[x]({server}/good) and [y]({server}/good#there)").root)
    assert "2 links to other sites: each leads somewhere" in capsys.readouterr().out


def test_no_network_is_told_apart_from_broken_links(tmp_path, server):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as closed:
        silent = f"http://127.0.0.1:{closed.server_port}"
    with pytest.raises(Problem, match="2 of 2 .*is there a network"):
        linkcheck.main([], book(tmp_path, f"[x]({silent}/a) and [y]({silent}/b)").root)


def test_a_book_that_sphinx_cannot_read_is_an_error_and_not_a_pass(tmp_path):
    broken = book(tmp_path, "text")
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: book/none\n", "utf-8")
    with pytest.raises(Problem, match="did not check the links"):
        linkcheck.main([], broken.root)
