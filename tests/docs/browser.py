"""A headless Chromium for tests: one browser, one tab, driven over the DevTools protocol through a pair of pipes.

    with Browser() as browser, serve(folder) as address:
        browser.open(f"{address}/start/")
        browser.resize(390)
        assert browser.evaluate("document.title") and not browser.complaints

It needs no port and no library and downloads nothing. It uses the machine's Chromium or Chrome; `missing()` explains how to
get one.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import functools
import http.server
import json
import os
import select
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

from tests.limits import HANGS_S

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions", "--hide-scrollbars",
         "--disable-dev-shm-usage", "--disable-background-networking", "--force-color-profile=srgb",
         "--remote-debugging-pipe")  # fmt: skip

# Chromium's errors for a call that was under way, or that came, between two pages.
LEFT_PAGE = ("Inspected target navigated or closed", "Cannot find context", "Execution context was destroyed")


class Navigated(AssertionError):
    """The tab went to another page during a call."""


def program() -> str | None:
    """The browser of this machine: $CHROMIUM, or the first of PROGRAMS."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, PROGRAMS)), None)


def missing() -> str:
    """Why browser tests cannot run here, '' if they can."""
    return "" if program() else "no Chromium: apt install chromium, or name one in $CHROMIUM"


def same_fonts(folder: Path) -> Path:
    """Writes a configuration of fontconfig: pages have matplotlib's fonts, and the same heights on all machines.

    With the fonts of a machine, lesson 02 had 7,584 pixels where Noto Sans CJK is installed, and less than 7,500 elsewhere.
    """
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    families = {"sans-serif": "DejaVu Sans", "serif": "DejaVu Serif", "monospace": "DejaVu Sans Mono"}
    aliases = "".join(f"<alias><family>{generic}</family><prefer><family>{family}</family></prefer></alias>"
                      for generic, family in families.items())
    path = folder / "fonts.conf"
    path.write_text(f"<fontconfig><dir>{fonts}</dir><cachedir>{folder}/fonts</cachedir>{aliases}</fontconfig>\n")
    return path


class Browser:
    """A started browser with one tab. Close it, or use it in a with block.

    Args:
        timeout: the most seconds for one answer, or for one page.

    Attributes:
        complaints: exceptions, console.error and failed loads since the last open().
    """

    def __init__(self, timeout: float = HANGS_S) -> None:
        self.timeout, self.complaints = timeout, []
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._number, self._session, self._rest, self._events = 0, None, b"", set()
        (theirs, to), (back, out) = os.pipe(), os.pipe()
        theirs_high, out_high = (fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs, out))
        # Chromium reads commands from file descriptor 3 and answers on 4; in this process they have other numbers.
        start = f'exec "$@" 3<&{theirs_high} 4>&{out_high}'
        command = [program(), *FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"]
        self._process = subprocess.Popen(["bash", "-c", start, "browser", *command], pass_fds=(theirs_high, out_high),
                                         env=os.environ | {"FONTCONFIG_FILE": str(same_fonts(Path(self._folder.name)))},
                                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        for fd in (theirs, out, theirs_high, out_high):
            os.close(fd)
        self._to, self._back, self._context = to, back, ""
        self.renew()

    def renew(self) -> None:
        """Leaves the tab, with its storage and settings, for a new one, as in a browser that has just started."""
        self._session = None
        if self._context:
            self.call("Target.disposeBrowserContext", browserContextId=self._context)
        self._context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=self._context)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(1280)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the browser."""
        with contextlib.suppress(Exception):
            self._session = None
            self.call("Browser.close")
        os.close(self._to)
        os.close(self._back)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    # ---- actions of a test

    def open(self, url: str) -> None:
        """Opens a page and waits until it has loaded. Clears the complaints."""
        self.complaints.clear()
        self._events.clear()
        answer = self.call("Page.navigate", url=url)
        assert not answer.get("errorText"), f"{url}: {answer['errorText']}"
        if answer.get("loaderId"):  # absent if only the anchor changes
            self._until(lambda: "Page.loadEventFired" in self._events, f"{url} to load")

    def resize(self, width: int, height: int = 900) -> None:
        """Sets the size of the window, in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression or of its promise.

        Raises:
            Navigated: the page was left before the browser answered.
            AssertionError: with the exception that the expression throws.
        """
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if thrown := answer.get("exceptionDetails"):
            raise AssertionError(_said(thrown))
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Evaluates an expression repeatedly, also while one page follows another, and returns its first true value."""
        end = time.monotonic() + self.timeout
        while time.monotonic() < end:
            with contextlib.suppress(Navigated):
                if value := self.evaluate(expression):
                    return value
            time.sleep(0.02)
        raise AssertionError(f"waited {self.timeout:g} s in vain for {expression}; {self.complaints}")

    def follow(self, selector: str) -> None:
        """Clicks on a link, and does not wait for the page it leads to."""
        # After this call's answer: a click inside it would leave the page first, and the browser would answer by an error.
        self.evaluate(f"void setTimeout(() => document.querySelector({json.dumps(selector)}).click())")

    def screenshot(self, path: Path | str, whole: bool = False) -> None:
        """Saves the window, or the whole page, as a PNG."""
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        Path(path).write_bytes(base64.b64decode(picture))

    # ---- the protocol: JSON objects, each ended by a zero byte

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends one command of the protocol and returns its answer; records the events that arrive in between."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        _write_all(self._to, json.dumps(message).encode() + b"\0")
        number, answers = self._number, []
        self._until(lambda: any(one.get("id") == number for one in answers), method, answers)
        answer = next(one for one in answers if one.get("id") == number)
        if error := answer.get("error"):
            kind = Navigated if any(words in error["message"] for words in LEFT_PAGE) else AssertionError
            raise kind(f"{method}: {error}")
        return answer["result"]

    def _until(self, done: Any, what: str, answers: list[dict[str, Any]] | None = None) -> None:
        end = time.monotonic() + self.timeout
        while not done():
            ready, _, _ = select.select([self._back], [], [], max(0.0, end - time.monotonic()))
            chunk = os.read(self._back, 1 << 16) if ready else b""
            if not chunk:
                raise AssertionError(f"waited in vain for {what}: the browser {'ended' if ready else 'is silent'}")
            *whole, self._rest = (self._rest + chunk).split(b"\0")
            for text in whole:
                message = json.loads(text)
                self._note(message)
                if answers is not None and "id" in message:
                    answers.append(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method", ""), message.get("params", {})
        self._events.add(method)
        if method == "Runtime.exceptionThrown":
            self.complaints.append(_said(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "assert"):
            words = (str(one.get("value", one.get("description"))) for one in parameters["args"])
            self.complaints.append(f"console.{parameters['type']}: {' '.join(words)}")
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            entry = parameters["entry"]
            self.complaints.append(f"{entry['text']} {entry.get('url', '')}".strip())


@functools.cache
def shared() -> Browser:
    """One browser for all tests of pages in this process; their conftest.py closes it."""
    return Browser()


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _said(details: dict[str, Any]) -> str:
    return details.get("exception", {}).get("description") or details.get("text", "an exception")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    extensions_map = {**http.server.SimpleHTTPRequestHandler.extensions_map, ".js": "text/javascript"}

    def log_message(self, *_: object) -> None:
        """Prints nothing: pytest shows failures."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Sends 404.html for a wrong address, as servers of static sites do."""
        page = Path(self.directory) / "404.html"
        if code != 404 or not page.exists():
            return super().send_error(code, message, explain)
        content = page.read_bytes()
        self.send_response(404)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serves a folder on a free port of this machine while the block runs; yields the address without a slash at its end."""
    handler = functools.partial(_Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
