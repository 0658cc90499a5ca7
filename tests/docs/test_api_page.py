"""All examples of docs/api.md run, and the page lists every route and every ignored field."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from logprobe.ignored_kwargs import FIELDS_WITHOUT_EFFECT, NEUTRAL_FIELDS
from logprobe.server import ServerSettings
from logprobe.server.app import ROUTES
from logprobe.server.openai.fields import SAMPLING_FIELDS
from server_process import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logprobe import LLM

PAGE = (Path(__file__).parents[2] / "docs/api.md").read_text()
SHELL = [code for code in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) if code.startswith("curl")]
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def url(long_llm: LLM, new_serving: Any) -> Iterator[str]:
    """The tiny Llama served with a context long enough for tools."""
    with new_serving(long_llm, ServerSettings(model_name="tiny")) as (address, _):
        yield address


@pytest.mark.parametrize("code", SHELL, ids=lambda code: code.split()[2].removeprefix("$URL"))
def test_a_curl_example_is_answered(url: str, code: str, tmp_path: Path) -> None:
    script = f"URL={url}\n" + code.replace("curl -s", "curl -sS --fail-with-body")
    done = subprocess.run(
        ["sh", "-e"], input=script, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("code", PYTHON)
def test_a_python_example_runs(
    url: str, code: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # httpx's default timeout of five seconds is too short for a busy machine.
    monkeypatch.setattr(httpx, "post", functools.partial(httpx.post, timeout=PATIENCE_S))
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        names: dict[str, Any] = {"client": client, "url": url, "model": "tiny"}
        exec(code, names)  # noqa: S102 - our own page
    assert capsys.readouterr().out


def test_the_page_names_every_route_and_field() -> None:
    for _, path, _ in ROUTES:
        plain = re.sub(r"/?{.*", "", path).removeprefix("/v1")
        assert plain in PAGE, path
    for name in (*FIELDS_WITHOUT_EFFECT, *NEUTRAL_FIELDS):
        assert f"`{name}`" in PAGE or name == "response_format", name
    openai_own = {"n", "best_of", "temperature", "top_p", "seed", "stop", "logit_bias", "response_format"}
    penalties = {"presence_penalty", "frequency_penalty"}
    for name in set(SAMPLING_FIELDS) - openai_own - penalties:
        assert f"`{name}`" in PAGE, name
