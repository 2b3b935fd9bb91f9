"""Debian's Chromium, driven by selenium: what tests of the page and the script of its pictures share."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.viewer.pages import Pages
from mmrl.viewer.server import ViewServer

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

_BROWSER, _DRIVER = "chromium", "chromedriver"
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--disable-dev-shm-usage", "--force-color-profile=srgb", "--disable-features=Translate,OptimizationHints"),
)
_WAIT_S = 30.0
PAGES = (
    *("run/0/curves", "run/0/step/2", "run/0/step/2?by=rollout", "run/0/step/2/plots", "run/0/step/2/group/0"),
    *("run/0/step/2/group/1?view=tokens", "run/0/step/2/group/3?view=episode", "run/0/step/2/group/4"),
    *("run/0/evaluation/2", "run/0/evaluations", "run/0/prompt?id=shapes/1", "run/0/about"),
    *("", "compare?runs=0,1", "compare?runs=0,1&tab=config", "compare?runs=0,1&tab=prompt&prompt=shapes/1"),
)
"""An address of each kind of page."""


def missing() -> str:
    """A sentence on what to install; empty if a browser can be started."""
    wanted = []
    if not all(map(shutil.which, (_BROWSER, _DRIVER))):
        wanted.append("`apt-get install --no-install-recommends chromium chromium-driver`")
    if find_spec("selenium") is None:
        wanted.append("the extra `dev` of this package (selenium)")
    return f"no browser to look at the page with; install {' and '.join(wanted)}" if wanted else ""


@contextmanager
def chromium(width: int = 1280, height: int = 900) -> Iterator[Chrome]:
    """A browser without a window, and with an empty profile of its own."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which(_BROWSER))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options, webdriver.ChromeService(str(shutil.which(_DRIVER))))
        # A browser without a window may take itself for one in the background, where nothing gets the focus.
        driver.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
        try:
            yield driver
        finally:
            driver.quit()


@contextmanager
def served(*runs: Path) -> Iterator[ViewServer]:
    """The viewer of these runs, served by a thread."""
    server = ViewServer(Pages(runs))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(_WAIT_S)


class Viewer:
    """A page in a browser.

    Attributes:
        driver: Selenium's.
        origin: What every request of the page begins with.
    """

    def __init__(self, driver: Chrome, url: str, origin: str) -> None:
        self.driver, self.url, self.origin = driver, url, origin
        driver.get(url)
        self.drawn()

    @classmethod
    def opened(cls, driver: Chrome, url: str) -> Viewer:
        """The page at this address of a server or of a file; what an earlier page said and asked is forgotten."""
        found = cls(driver, url, url.partition("?")[0])
        found.complaints(), found.strangers()
        return found

    def open(self, address: str) -> None:
        """Go to an address in the page, such as ``run/0/curves``, and wait until it is drawn."""
        before = self.script("return document.getElementById('main').dataset.drawn")
        if self.script("return location.hash") == f"#/{address}":
            self.reload()
            return
        self.script("location.hash = arguments[0]", f"#/{address}")
        self.until(
            lambda: self.script("return document.getElementById('main').dataset.drawn") != before, "the page is drawn"
        )

    def reload(self) -> None:
        self.driver.refresh()
        self.drawn()

    def drawn(self) -> None:
        self.until(lambda: self.script("return Boolean(document.querySelector('#main h1'))"), "the page has a heading")

    def press(self, *keys: str) -> None:
        """Press keys, one after another, where the focus is; each may lead to another page."""
        from selenium.webdriver import ActionChains

        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def until(self, test: Callable[[], Any], what: str, wait_s: float = _WAIT_S) -> Any:
        """Waits until the answer of ``test`` is true, and returns it."""
        end = time.monotonic() + wait_s
        while not (found := test()):
            assert time.monotonic() < end, f"not within {wait_s:g} s: {what}; {self.address}: {self.text()[:500]}"
            time.sleep(0.02)
        return found

    def script(self, text: str, *arguments: Any) -> Any:
        return self.driver.execute_script(text, *arguments)

    @property
    def address(self) -> str:
        return str(self.script("return decodeURIComponent(location.hash)"))

    @property
    def page(self) -> str:
        """The path of the page that is drawn."""
        return str(self.script("return document.getElementById('main').dataset.page"))

    def text(self, selector: str = "#main") -> str:
        """The text of an element, as it was written and not as it is laid out."""
        found = self.script("return document.querySelector(arguments[0])?.textContent", selector)
        assert found is not None, f"{self.address} has no {selector}"
        return str(found)

    def texts(self, selector: str) -> list[str]:
        """The text of each element."""
        query = "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)"
        return list(self.script(query, selector))

    def count(self, selector: str) -> int:
        return int(self.script("return document.querySelectorAll(arguments[0]).length", selector))

    def click(self, selector: str) -> None:
        self.script("document.querySelector(arguments[0]).click()", selector)

    def type(self, selector: str, text: str) -> None:
        """Give an input a text, as somebody who types it."""
        script = (
            "const input = document.querySelector(arguments[0]); input.value = arguments[1];"
            "for (const kind of ['input', 'change']) input.dispatchEvent(new Event(kind, {bubbles: true}))"
        )
        self.script(script, selector, text)

    def width(self, pixels: int, height: int = 900, scale: float = 1.0) -> None:
        """Show the page in a window of so many CSS pixels."""
        metrics = {"width": pixels, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def scheme(self, name: str) -> None:
        """Ask for ``dark`` or ``light``."""
        features: Sequence[Mapping[str, str]] = [{"name": "prefers-color-scheme", "value": name}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def complaints(self) -> list[str]:
        """Returns the warnings and errors of the console since the last time."""
        entries = self.driver.get_log("browser")
        return [each["message"] for each in entries if each["level"] in ("WARNING", "SEVERE")]

    def strangers(self) -> list[str]:
        """Requests since the last time to anywhere but the page's own origin."""
        events = [json.loads(each["message"])["message"] for each in self.driver.get_log("performance")]
        urls = [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith((self.origin, "data:"))]
