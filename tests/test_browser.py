# SPDX-License-Identifier: Apache-2.0
"""tests/browser.py finds errors of scripts and requests and too wide pages, and sets the window's width and colors."""

import struct

import pytest

from tests.browser import DESKTOP, PHONE

PAGE = """<!doctype html><html><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,"></head>
<body style="margin: 0">{body}</body></html>"""


@pytest.fixture
def write(tmp_path):
    def write(body):
        path = tmp_path / "a page.html"
        path.write_text(PAGE.format(title="title", body=body), encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_a_clean_page_is_accepted_at_the_width_that_was_asked_for(browser, write, tmp_path, width):
    page = write("<p>Text</p><div style='overflow-x: auto'><div style='width: 3000px'>scrolls by itself</div></div>")
    browser.open(page, width=width, height=500, color_scheme="dark")
    browser.check()
    assert browser.run("return [innerWidth, document.title]") == [width, "title"]
    assert browser.run("return matchMedia('(prefers-color-scheme: dark)').matches")
    picture = browser.screenshot(tmp_path / "page.png", whole_page=False).read_bytes()
    assert struct.unpack(">II", picture[16:24]) == (width, 500)


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("<script>undefined_function()</script>", "undefined_function is not defined"),
        ("<script>console.error('by hand')</script>", "by hand"),
        ("<img src='missing.png'>", "404"),
        ("<script src='https://example.com/library.js'></script>", "ERR_NAME_NOT_RESOLVED"),
        ("<div style='width: 2000px'>wide</div>", "wider than the window"),
    ],
    ids=["script", "logged", "missing file", "network", "too wide"],
)
def test_what_is_wrong_with_a_page_is_found(browser, write, body, message, width):
    browser.open(write(body), width=width)
    with pytest.raises(AssertionError, match=message):
        browser.check()


def test_a_long_page_is_taken_whole_and_its_errors_are_forgotten_by_the_next(browser, write, tmp_path):
    browser.open(write("<script>console.error('old')</script>"))
    write("<div style='height: 2500px'>long</div>")
    browser.open(tmp_path, "a%20page.html")
    browser.check()
    picture = browser.screenshot(tmp_path / "long.png").read_bytes()
    assert struct.unpack(">II", picture[16:24]) == (DESKTOP, 2500)
