# SPDX-License-Identifier: Apache-2.0
"""The documentation as a site: it builds in strict mode without network, and its pages have no errors in a browser."""

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser import DESKTOP, PHONE

ROOT = Path(__file__).parents[1]
# A folder for the screenshots, to look at them.
SCREENSHOTS = os.environ.get("SCREENSHOTS")
PAGES = {
    "index": "nystrom_models",
    "get-started": "Get started",
    "pretrain": "Pretrain",
    "any-encoder": "Any encoder by one argument",
    "speed": "Speed and memory",
    "capabilities": "What others cannot do",
    "how-it-works": "How it works",
    "options": "Options",
    "flags/run_glue": "run_glue.py",
    "flags/nystrom-models": "nystrom-models",
    "reference/configurations-and-models": "Configurations and models",
    "model_cards/nystromformer/base-512": "nystromformer/base-512",
}
# A proxy on a closed port: every access to the network fails.
OFFLINE = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
# Without the theme's notice about its successor.
QUIET = {"NO_MKDOCS_2_WARNING": "1"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("the extra `docs` is not installed")
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | QUIET | OFFLINE | {name.upper(): value for name, value in OFFLINE.items()}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "WARNING" not in done.stderr, done.stderr[-3000:]
    return folder


def test_the_site_has_a_page_for_every_file_and_names_no_other_host(site):
    for path in (ROOT / "docs").glob("*.md"):
        assert (site / f"{path.stem}.html").is_file()
    for folder in ("model_cards", "configs"):
        for path in (ROOT / folder).glob("*former/*"):
            assert (site / "model_cards" / path.parent.name / f"{path.stem}.html").is_file()
    for path in (ROOT / "benchmarks" / "results").iterdir():
        assert (site / "results" / (path.name if path.suffix == ".png" else f"{path.stem}.html")).is_file()
    # Links may lead elsewhere; nothing that a browser loads by itself may.
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\b(?:src|srcset)=\"?([^\s\">]+)", page.read_text())
        loaded += re.findall(r"<link\b[^>]*rel=\"?(?:stylesheet|preconnect|icon)[^>]*>", page.read_text())
        assert not [address for address in loaded if "//" in address], page


def test_code_stands_beside_its_equations_and_every_public_name_has_an_entry(site):
    page = (site / "how-it-works.html").read_text(encoding="utf-8")
    assert page.count("attention_nystrom.py: ") >= 4 and "../src/" not in page
    import nystrom_models

    reference = (site / "reference" / "configurations-and-models.html").read_text(encoding="utf-8")
    for name in nystrom_models.__all__:
        assert re.search(rf'id="nystrom_models\.(\w+\.)*{name}"', reference), name


def test_flags_are_those_of_the_scripts(site):
    from examples import run_glue, run_pretraining

    for script, parts in (
        ("run_pretraining", (run_pretraining.PretrainingArguments, run_pretraining.OptimizationArguments)),
        ("run_glue", (run_glue.GlueArguments, run_glue.FinetuningOptimizationArguments)),
    ):
        page = (site / "flags" / f"{script}.html").read_text(encoding="utf-8")
        shown = re.findall(r"<td><code>--(\w+)</code></td>\s*<td>(.*?)</td>", page)
        fields = [field for part in parts for field in dataclasses.fields(part)]
        assert sorted(name for name, _ in shown) == sorted(field.name for field in fields)
        rate = next(field.default for field in fields if field.name == "learning_rate")
        assert float(re.sub("<.*?>", "", dict(shown)["learning_rate"])) == rate


def test_the_command_has_a_page_of_all_its_flags(site):
    page = (site / "flags" / "nystrom-models.html").read_text(encoding="utf-8")
    for name, flags in {"convert": ["--max_length", "--feature_map"], "inspect": ["--mlm_accuracy_by_layer"]}.items():
        part = page.partition(f'<h2 id="{name}"')[2].partition("<h2")[0]
        for flag in ["OUT", "--traceback", *flags] if name == "convert" else flags:
            assert f"<code>{flag}</code>" in part


@pytest.mark.parametrize(
    "width", [pytest.param(DESKTOP, id="desktop", marks=pytest.mark.slow), pytest.param(PHONE, id="phone")]
)
def test_the_pages_are_sound_in_a_browser(site, browser, width):
    """No console error, nothing wider than the window, and the title and the navigation are visible."""
    for page, title in PAGES.items():
        for scheme in ("light", "dark") if page == "index" else ("light",):
            browser.open(site, f"{page}.html", width=width, color_scheme=scheme)
            browser.check()
            assert browser.run("return document.querySelector('h1').innerText").startswith(title), page
            assert len(browser.run("return document.body.innerText")) > 500
            broken = "return [...document.images].filter(i => i.offsetParent && !i.naturalWidth).map(i => i.src)"
            assert not browser.run(broken), page
            if SCREENSHOTS:
                Path(SCREENSHOTS).mkdir(parents=True, exist_ok=True)
                name = f"{page.replace('/', '-')}-{width}-{scheme}.png"
                browser.screenshot(Path(SCREENSHOTS, name))


VISIBLE = """
const link = [...document.querySelectorAll('.md-nav--primary a, .md-tabs a')].find(
    a => a.getAttribute('href').split('/').pop() === arguments[0]
      && a.checkVisibility({visibilityProperty: true}) && a.getBoundingClientRect().width > 0);
if (!link) return false;
const box = link.getBoundingClientRect();
return box.right > 0 && box.left < innerWidth;
"""


@pytest.mark.parametrize("width", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_every_task_is_reached_by_the_navigation(site, browser, width):
    browser.open(site, "tasks.html", width=width)
    if width == PHONE:
        browser.run("document.querySelector('label.md-header__button[for=__drawer]').click()")
    wait_for(browser, "load.html")
    for page in ("load", "pretrain", "fine-tune", "convert", "generate", "export", "built-in"):
        assert browser.run(VISIBLE, f"{page}.html"), page


def wait_for(browser, page):
    """Waits until the navigation shows a page: it is laid out, and its drawer is open."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser.driver, 5).until(lambda _: browser.run(VISIBLE, page))


def test_the_search_finds_a_field(site, browser):
    browser.open(site, "index.html")
    browser.run(
        "const box = document.querySelector('.md-search__input'); box.focus(); box.value = 'num_landmarks';"
        "box.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}));"
    )
    from selenium.webdriver.support.ui import WebDriverWait

    found = "return [...document.querySelectorAll('.md-search-result__item')].map(item => item.innerText)"
    results = WebDriverWait(browser.driver, 10).until(lambda _: browser.run(found))
    assert any("num_landmarks" in text for text in results)
    assert not browser.errors()
