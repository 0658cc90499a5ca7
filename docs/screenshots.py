"""Draw docs/pictures: the page at three widths, and an answer as JSON, by Chromium and the default model.

`make screenshots` runs it. Beside the pictures it notes the page's digest, by which a test sees that they are
of another page.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logprobe.server.routes.facts import assemble

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).parent / "pictures"
NOTE = FOLDER / "page.json"
# File → width, height, scheme.
SHOTS = {
    "page": (1280, 760, "light"),
    "page-dark": (1280, 760, "dark"),
    "page-768": (768, 900, "light"),
    "page-380": (380, 820, "light"),
}
JSON_SHOT = "page-json"
REVIEW = "The soup was cold and the waiter rude. Summarise this review as JSON."
SCHEMA = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["happy", "sad", "angry"]},
        "recommend": {"type": "boolean"},
        "stars": {"enum": [1, 2, 3, 4, 5]},
    },
    "required": ["mood", "recommend", "stars"],
    "additionalProperties": False,
}
START_LIMIT_S = 180
IN_HAND = 6  # the token that the pictures tell about


def digest() -> str:
    """Of the page as it is served."""
    return hashlib.sha256(assemble()[0]).hexdigest()


@contextmanager
def serving() -> Iterator[str]:
    """`logprobe serve smollm2` on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "logprobe", "serve", "smollm2", "--port", url.rpartition(":")[2]]
    with subprocess.Popen(command) as process:  # noqa: S603 - our own command
        try:
            _wait_until_ready(url, process)
            yield url
        finally:
            process.terminate()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=5).close()  # noqa: S310 - our own address
        except OSError as error:  # refused, or not answered yet
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the server did not start") from error
            time.sleep(0.2)
        else:
            return


@contextmanager
def asked(browser: Any, url: str, width: int, height: int, scheme: str) -> Iterator[Any]:
    """The page in a tab of its own."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    tab = context.new_page()
    tab.goto(url)
    tab.wait_for_selector("body[data-ready]")
    yield tab
    context.close()


def ask(tab: Any) -> None:
    """Press the button, wait for the end, and take a token in hand."""
    tab.click("#go")
    tab.wait_for_selector("#csv:not([disabled])", timeout=60_000)
    tab.locator(".token").nth(IN_HAND).hover()
    tab.evaluate("document.getElementById('status').textContent = ''")  # a time differs from run to run


def shoot(browser: Any, url: str, name: str) -> None:
    """One picture: a continued text with a token in hand."""
    width, height, scheme = SHOTS[name]
    with asked(browser, url, width, height, scheme) as tab:
        ask(tab)
        if width < height:
            tab.locator("#legend").scroll_into_view_if_needed()
            tab.evaluate("document.getElementById('legend').scrollIntoView()")
        tab.screenshot(path=FOLDER / f"{name}.png")


def shoot_json(browser: Any, url: str) -> None:
    """One picture: the values of an answer as JSON, from the legend down."""
    with asked(browser, url, *SHOTS["page"]) as tab:
        tab.click("#form summary")
        tab.fill("#schema", json.dumps(SCHEMA))
        tab.check("#chat")
        tab.fill("#text-a", REVIEW)
        ask(tab)
        tab.evaluate("document.getElementById('legend').scrollIntoView()")
        tab.screenshot(path=FOLDER / f"{JSON_SHOT}.png")


def main() -> None:
    """Draw them all."""
    from playwright.sync_api import sync_playwright

    FOLDER.mkdir(exist_ok=True)
    with serving() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name in SHOTS:
            shoot(browser, url, name)
        shoot_json(browser, url)
        browser.close()
    NOTE.write_text(json.dumps({"page_sha256": digest()}) + "\n")


if __name__ == "__main__":
    main()
