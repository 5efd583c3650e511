# SPDX-License-Identifier: Apache-2.0
"""HTML pages in headless Chromium: console errors, horizontal overflow, screenshots.

Tests ask for the fixture `browser` of tests/conftest.py, which skips them where Chromium, its driver or selenium is
missing (on Debian: `apt-get install chromium chromium-driver`):

    def test_the_page_is_clean(browser, tmp_path):
        browser.open(tmp_path / "report.html", width=390)
        browser.check()
        browser.screenshot(tmp_path / "report.png")

No page reaches the network: the browser knows only the host 127.0.0.1; a request to another one is a console error.
"""

import contextlib
import functools
import http.server
import importlib.util
import shutil
import threading
import time
import urllib.parse
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRIVERS = ("chromedriver",)
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root in a container
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
# Widths in CSS pixels.
DESKTOP, PHONE = 1280, 390


def why_not() -> str | None:
    """What is missing to open pages in a browser; None if nothing is missing."""
    if importlib.util.find_spec("selenium") is None:
        return "selenium is not installed"
    for kind, names in (("Chromium", BROWSERS), ("chromedriver", DRIVERS)):
        if not any(map(shutil.which, names)):
            return f"{kind} is not installed"
    return None


def _first(names: tuple[str, ...]) -> str:
    return next(path for path in map(shutil.which, names) if path)


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-store")  # a changed page is loaded again
        super().end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serves a folder on a free port of 127.0.0.1; yields its address without a slash at the end."""
    handler = functools.partial(_QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class Browser:
    """A headless Chromium with an empty profile, for any number of pages. A context manager.

    Args:
        profile: an empty folder for the user data.

    Attributes:
        driver: selenium's driver, for functions that this class does not have.
    """

    def __init__(self, profile: Path):
        from selenium import webdriver
        from selenium.webdriver.chrome.options import Options
        from selenium.webdriver.chrome.service import Service

        options = Options()
        options.binary_location = _first(BROWSERS)
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self._servers = contextlib.ExitStack()
        self._addresses: dict[Path, str] = {}
        self._width = 0
        self.driver = webdriver.Chrome(options=options, service=Service(_first(DRIVERS)))

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.driver.quit()
        self._servers.close()

    def open(
        self,
        target: Path,
        page: str = "",
        *,
        width: int = DESKTOP,
        height: int = 900,
        color_scheme: str = "light",
    ) -> None:
        """Opens a page and waits until it and its resources are loaded. Earlier console entries are forgotten.

        Args:
            target: an HTML file, or a folder, which is then served.
            page: the page in a folder, relative to it; may end in `#anchor`. Empty: the folder's `index.html`.
            width, height: of the window, in CSS pixels. Below 600, the page sees a phone.
            color_scheme: "light" or "dark", what `prefers-color-scheme` gives.
        """
        target = Path(target).resolve()
        if target.is_file():
            target, page = target.parent, urllib.parse.quote(target.name)
        if not target.is_dir():
            raise FileNotFoundError(target)
        if target not in self._addresses:
            self._addresses[target] = self._servers.enter_context(serve(target))
        self._width = width
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"features": [{"name": "prefers-color-scheme", "value": color_scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
        self.driver.get("about:blank")  # otherwise, a change of only the anchor would not reload the page
        self.driver.get_log("browser")
        self.driver.get(f"{self._addresses[target]}/{page}")

    def run(self, script: str, *arguments: Any) -> Any:
        """The result of JavaScript code in the open page: `browser.run("return document.title")`."""
        return self.driver.execute_script(script, *arguments)

    def errors(self) -> list[str]:
        """Errors in the console since the last call, or since the page was opened: scripts, failed requests."""
        # Entries arrive in order, but after the page is loaded: when this one has arrived, all have.
        mark = f"mark-{time.monotonic_ns()}"
        self.run("console.info(arguments[0])", mark)
        entries: list[dict[str, Any]] = []
        deadline = time.monotonic() + 10
        while not any(mark in entry["message"] for entry in entries):
            assert time.monotonic() < deadline, "The browser's console does not answer."
            entries += self.driver.get_log("browser")
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window, without elements that scroll in a box of their own."""
        # Not window.innerWidth: on a phone, it grows with content that does not fit.
        return self.run("return document.documentElement.scrollWidth") - self._width

    def check(self) -> None:
        """Fails on a console error, and if the page must be scrolled horizontally."""
        found = self.errors()
        assert not found, "\n".join([self.driver.current_url, *found])
        assert self.overflow() <= 0, f"{self.driver.current_url} is {self.overflow()} pixels wider than the window"

    def screenshot(self, path: Path, *, whole_page: bool = True) -> Path:
        """Writes a PNG of the whole page, or of the visible part, and returns its path."""
        options = {"format": "png", "captureBeyondViewport": whole_page}
        if whole_page:
            size = self.driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
            options["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        taken = self.driver.execute_cdp_cmd("Page.captureScreenshot", options)
        path = Path(path)
        path.write_bytes(b64decode(taken["data"]))
        return path
