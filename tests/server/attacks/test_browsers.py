"""Requests of web pages to a server on the same machine are refused, unless their origin is allowed."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from starlette.datastructures import Headers

from logprobe.server import ServerSettings
from logprobe.server.http.errors import ApiError
from logprobe.server.http.gate import check_caller, is_own_name

EVERYWHERE = "0.0.0.0"  # noqa: S104 - nothing is bound
BODY = b'{"prompt": "the cat", "max_tokens": 1}'


@pytest.mark.parametrize(
    "media_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
def test_a_form_or_plain_text_is_no_json(attacked: Any, media_type: str) -> None:
    reply = attacked.send("/v1/completions", BODY, Content_Type=media_type)
    assert reply.status == 415
    assert reply.error["code"] == "unsupported_media_type"


@pytest.mark.parametrize("media_type", ["application/json", "Application/JSON; charset=utf-8"])
def test_json_is_json(attacked: Any, media_type: str) -> None:
    assert attacked.send("/v1/completions", BODY, Content_Type=media_type).status == 200


@pytest.mark.parametrize("origin", ["https://a.example", "null", "http://localhost:1"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/no_such_route"])
def test_a_page_of_another_origin_is_refused(attacked: Any, origin: str, path: str) -> None:
    reply = attacked.send(path, BODY, Origin=origin)
    assert reply.status == 403
    assert reply.error["code"] == "origin_not_allowed"


@pytest.mark.parametrize(
    "host", ["a.example", "a.example:8000", "10.0.0.1", "[::2]:80", "", "[", "user@localhost"]
)
def test_a_name_that_is_not_the_servers_is_refused(attacked: Any, host: str) -> None:
    reply = attacked.get("/v1/models", Host=host)
    assert reply.status == 403
    assert reply.error["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1:9", "127.3.4.5", "[::1]:8000", f"{EVERYWHERE}:9", "[::]"]
)
def test_the_machines_own_names_are_let_in(attacked: Any, host: str) -> None:
    assert attacked.get("/v1/models", Host=host).status == 200


@pytest.mark.parametrize(
    ("settings", "host", "is_own"),
    [
        ({"host": EVERYWHERE}, "10.0.0.1:8000", True),
        ({"host": EVERYWHERE}, "a.example", False),
        ({"host": "::"}, "[fd00::1]", True),
        ({"host": "10.0.0.1"}, "10.0.0.1", True),
        ({"host": "10.0.0.1"}, "10.0.0.2", False),
        ({"host": "10.0.0.1"}, EVERYWHERE, False),
        ({"host": "localhost"}, EVERYWHERE, True),
        ({"host": "::1"}, "[::]:8000", True),
        ({"host": "box.lan"}, "box.lan:8000", True),
        ({"host": "box.lan"}, "[::]", False),
        ({"allowed_host": ("A.example",)}, "a.example.:80", True),
        ({"allowed_host": ("a.example",)}, "b.a.example", False),
        ({"allowed_host": ("*",)}, "b.example", True),
        ({"allowed_host": ("*",)}, "", False),
    ],
)
def test_the_bound_address_and_allowed_names_are_the_servers_own(
    settings: dict[str, Any], host: str, is_own: bool
) -> None:
    assert is_own_name(host, ServerSettings(**settings)) == is_own


def test_programs_may_call_this_machine_by_the_unspecified_address(attacked: Any) -> None:
    with openai.OpenAI(base_url=f"http://{EVERYWHERE}:{attacked.port}/v1", api_key="none") as client:
        assert client.completions.create(model="default", prompt="the cat", max_tokens=1).choices


@pytest.mark.parametrize("name", [EVERYWHERE, "[::]", "127.0.0.1"])
@pytest.mark.parametrize("origin", [EVERYWHERE, "[::]", "a.example"])
def test_pages_may_not(attacked: Any, name: str, origin: str) -> None:
    asked = {"Host": f"{name}:{attacked.port}", "Origin": f"http://{origin}:{attacked.port}"}
    for reply in (attacked.send("/v1/completions", BODY, **asked), attacked.get("/v1/models", **asked)):
        assert reply.status == 403
        assert reply.error["code"] == "origin_not_allowed"


def test_the_page_of_a_server_that_listens_everywhere_may_stand_there() -> None:
    own = Headers({"host": f"{EVERYWHERE}:8000", "origin": f"http://{EVERYWHERE}:8000"})
    check_caller(own, "http", ServerSettings(host=EVERYWHERE))
    check_caller(own, "http", ServerSettings(allowed_origins=(own["origin"],)))
    with pytest.raises(ApiError):
        check_caller(own, "http", ServerSettings())
