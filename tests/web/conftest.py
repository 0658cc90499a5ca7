"""Drive the system's Chromium by Playwright."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from server_process import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OTHER_NAME = "rebound.example"  # resolved to this machine by the browser, as in a DNS rebinding attack


@pytest.fixture(scope="session")
def other_name() -> str:
    """A foreign host name that the browser resolves to this machine."""
    return OTHER_NAME


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The system's Chromium; without it tests are skipped, except under `make test-web`."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    missing = None if path else "there is no chromium on the path; `make test-web` installs it"
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing = "playwright is not installed; `make test-web` installs it"
    if missing:
        assert "REQUIRE_CHROMIUM" not in os.environ, missing
        pytest.skip(missing)
    with sync_playwright() as playwright:
        rules = f"--host-resolver-rules=MAP {OTHER_NAME} 127.0.0.1"
        made = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", rules], timeout=PATIENCE_S * 1000
        )
        yield made
        made.close()


@pytest.fixture
def new_tab(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open a tab with separate cookies and a given size, and timeouts for a busy machine."""
    contexts = []

    def new(**options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(PATIENCE_S * 1000)
        return context.new_page()

    yield new
    for context in contexts:
        context.close()
