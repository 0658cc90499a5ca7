"""A chat template that never ends delays only chat requests."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import httpx

from conftest import CHAT_TEMPLATE
from logprobe import LLM
from logprobe.server import ServerSettings
from logprobe.text import rendering

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

ENDLESS = "{% for a in range(99998) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
CHAT = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 1}


def test_an_endless_template_leaves_the_server_to_others(
    tiny_model_folder: Path, new_serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "LIMIT_S", 600.0)
    replies: list[httpx.Response] = []
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21) as llm:
        llm.text.tokenizer.chat_template = CHAT_TEMPLATE + ENDLESS
        with new_serving(llm, ServerSettings()) as (url, _):
            chat = threading.Thread(
                target=lambda: replies.append(
                    httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=600)
                )
            )
            chat.start()
            while rendering.PROCESS._process is None:
                assert chat.is_alive(), [reply.text for reply in replies]
            asked = {"prompt": "the", "max_tokens": 1}
            assert httpx.get(f"{url}/health", timeout=300).status_code == 200
            assert httpx.post(f"{url}/v1/completions", json=asked, timeout=300).status_code == 200
            assert replies == []
            rendering.PROCESS._process.kill()
            chat.join()
    assert replies[0].status_code == 400
    assert replies[0].json()["error"]["param"] == "messages"
