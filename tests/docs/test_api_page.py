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

from conftest import save_tiny_llama
from logprobe.ignored_kwargs import FIELDS_WITHOUT_EFFECT, NEUTRAL_FIELDS
from logprobe.server import ServerSettings
from logprobe.server.app import ROUTES
from logprobe.server.openai.fields import SAMPLING_FIELDS
from server_process import PATIENCE_S
from vllm_fields import FIELDS, request_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logprobe import LLM

PAGE = (Path(__file__).parents[2] / "docs/api.md").read_text()
SHELL = [code for code in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) if "curl" in code]
OPERATOR_KEY = "operator-key-0123456789"
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def url(long_llm: LLM, new_serving: Any) -> Iterator[str]:
    """The tiny Llama served with a context long enough for tools."""
    with new_serving(long_llm, ServerSettings(model_name="tiny")) as (address, _):
        yield address


@pytest.fixture(scope="module")
def operated(
    tmp_path_factory: pytest.TempPathFactory, new_serving: Any, adapter_folders: dict[str, Path]
) -> Iterator[tuple[str, dict[str, Path]]]:
    """A server for operators, and the folders that the page names."""
    from logprobe import LLM

    folder = save_tiny_llama(tmp_path_factory.mktemp("operated"))
    folders = {"/models/legal": adapter_folders["wide"], "/models/step-1200": folder}
    with (
        LLM(str(folder), kv_cache_memory_bytes=1 << 21) as llm,
        new_serving(llm, ServerSettings(operator_key=(OPERATOR_KEY,))) as (address, _),
    ):
        yield address, folders


def run_shell(url: str, code: str, folder: Path) -> None:
    script = f"URL={url}\nOPERATOR_KEY={OPERATOR_KEY}\n" + code.replace(
        "curl -s", "curl -sS --fail-with-body"
    )
    done = subprocess.run(["sh", "-e"], input=script, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("code", [code for code in SHELL if "OPERATOR_KEY" not in code])
def test_a_curl_example_is_answered(url: str, code: str, tmp_path: Path) -> None:
    run_shell(url, code, tmp_path)


@pytest.mark.parametrize("code", [code for code in SHELL if "OPERATOR_KEY" in code])
def test_an_operators_curl_example_is_answered(
    operated: tuple[str, dict[str, Path]], code: str, tmp_path: Path
) -> None:
    address, folders = operated
    for name, folder in folders.items():
        code = code.replace(name, str(folder))
    run_shell(address, code, tmp_path)


def test_the_table_of_routes_has_each_route_once_and_each_has_a_curl_line() -> None:
    table = PAGE.partition("## Routes\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    listed = [[re.findall(r"`(\w+ [^`]+)`", cell) for cell in row] for row in rows]
    found = [route for row in listed for cell in row for route in cell]
    assert sorted(found) == sorted(f"{method} {path.replace(':path', '')}" for method, path, _ in ROUTES)
    lines = [line for code in SHELL for line in code.splitlines() if "$URL" in line]
    for (route,), _ in listed:
        method, path = route.split()
        pattern = r"\$URL" + re.sub(r"\\{\w+\\}", r"[^/ ]+", re.escape(path)) + r"(?=[ )]|$)"
        sent = [line for line in lines if re.search(pattern, line)]
        kinds = {
            "DELETE" if "DELETE" in line else "POST" if re.search("-X POST|Content-Type", line) else "GET"
            for line in sent
        }
        assert method in kinds, route


def test_the_section_on_vllms_fields_says_what_the_server_does(url: str) -> None:
    table = PAGE.partition("### vLLM's fields\n")[2].partition("\n### ")[0]
    rows: dict[str, dict[str, str]] = {}
    lists = r"^(Accepted|Ignored|Refused) in ([a-z ]+): (.+?)\.$"
    for status, routes, names in re.findall(lists, table, re.MULTILINE | re.DOTALL):
        for name in re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", names, flags=re.DOTALL)):
            rows.setdefault(name, {}).update(dict.fromkeys(routes.split(" and "), status.lower()))
    assert rows.keys() == {name for fields in FIELDS.values() for name in fields}
    for name, told in rows.items():
        for path, route in zip(FIELDS, ("chat", "completions"), strict=True):
            status = told.get(route, "-")
            if name not in FIELDS[path]:
                assert status == "-", (name, path)
                continue
            reply = httpx.post(url + path, json=request_of(path, name), timeout=PATIENCE_S)
            is_read = name not in reply.headers.get("warning", "") or name in {
                "reasoning_effort",
                "chat_template_kwargs",
            }
            found = "refused" if reply.status_code == 400 else "accepted" if is_read else "ignored"
            assert reply.status_code in {200, 400}, reply.text
            assert found == status, (name, path, reply.text[:500])


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


def test_the_page_names_every_field() -> None:
    for name in (*FIELDS_WITHOUT_EFFECT, *NEUTRAL_FIELDS):
        assert f"`{name}`" in PAGE or name == "response_format", name
    openai_own = {"n", "best_of", "temperature", "top_p", "seed", "stop", "logit_bias", "response_format"}
    penalties = {"presence_penalty", "frequency_penalty"}
    for name in set(SAMPLING_FIELDS) - openai_own - penalties:
        assert f"`{name}`" in PAGE, name
