"""Operator routes called by clients and web pages, and with hostile folders by an operator."""

from __future__ import annotations

import json
import os
import shutil
import socket
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.server.app import OPERATORS
from server_process import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from server_process import Attacked, Reply

CLIENT, OPERATOR = "a-client-of-it", "an-operators-own-key"
COMPLETIONS = "/v1/completions"
LONG = {"prompt": [*range(5, 60)], "max_tokens": 1, "temperature": 0}
PAGE = "https://a.example"
# Headers and the expected status: a page is refused by its origin before its key is checked.
CALLERS: dict[str, tuple[dict[str, str], int]] = {
    "no key": ({}, 401),
    "a client's key": ({"Authorization": f"Bearer {CLIENT}"}, 401),
    "a longer key": ({"Authorization": f"Bearer {OPERATOR}x"}, 401),
    "a shorter key": ({"Authorization": f"Bearer {OPERATOR[:-1]}"}, 401),
    "no Bearer": ({"Authorization": OPERATOR}, 401),
    "another scheme": ({"Authorization": f"Basic {OPERATOR}"}, 401),
    "two keys in one line": ({"Authorization": f"Bearer {CLIENT}, Bearer {OPERATOR}"}, 401),
    "a header of another name": ({"X-Api-Key": OPERATOR}, 401),
    "a cookie": ({"Cookie": f"Authorization=Bearer {OPERATOR}"}, 401),
    "a page": ({"Origin": PAGE}, 403),
    "a page with a simple content type": ({"Origin": PAGE, "Content_Type": "text/plain"}, 403),
    "a page that has the key": ({"Origin": PAGE, "Authorization": f"Bearer {OPERATOR}"}, 403),
    "a page by another name": ({"Host": "a.example", "Authorization": f"Bearer {OPERATOR}"}, 403),
    "a page that hides its origin": ({"Origin": "null", "Content_Type": "text/plain"}, 403),
}


@pytest.fixture(scope="module")
def locked(serve_process: Any) -> Iterator[Attacked]:
    """A server with keys of both kinds."""
    with serve_process("--api-key", CLIENT, "--operator-key", OPERATOR) as server:
        yield server


@pytest.fixture
def bodies(tiny_model_folder: Path, adapter_folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Return bodies that have an effect when sent by an operator."""
    lora = {"lora_name": "mine", "lora_path": str(adapter_folders["wide"])}
    return {
        "/v1/load_lora_adapter": lora,
        "/v1/unload_lora_adapter": {"lora_name": "mine"},
        "/update_weights_from_disk": {"model_path": str(tiny_model_folder), "weight_version": "other"},
        "/reset_prefix_cache": {},
    }


def order(server: Attacked, path: str, body: Any) -> Reply:
    return server.send(path, json.dumps(body).encode(), Authorization=f"Bearer {OPERATOR}")


def state_of(server: Attacked) -> tuple[Any, int]:
    """Return the models with their versions, and how much of a prompt is cached."""
    key = {"Authorization": f"Bearer {CLIENT}"}
    models = json.loads(server.get("/v1/models", **key).data)["data"]
    usage = json.loads(server.send(COMPLETIONS, json.dumps(LONG).encode(), **key).data)["usage"]
    versions = [(model["id"], model.get("weight_version")) for model in models]
    return versions, usage["prompt_tokens_details"]["cached_tokens"]


def test_every_route_of_operators_is_tried(bodies: dict[str, Any]) -> None:
    assert bodies.keys() == OPERATORS


@pytest.mark.parametrize("caller", CALLERS)
def test_whoever_is_no_operator_changes_nothing(
    locked: Attacked, bodies: dict[str, dict[str, Any]], caller: str
) -> None:
    assert order(locked, "/v1/unload_lora_adapter", bodies["/v1/unload_lora_adapter"]).status in {200, 400}
    state_of(locked)
    before = state_of(locked)
    assert before[1] > 0
    headers, status = CALLERS[caller]
    for path, body in bodies.items():
        data = json.dumps(body).encode()
        assert locked.send(path, data, **headers).status == status, path
        assert locked.send(f"{path}?key={OPERATOR}&api_key={OPERATOR}", data, **headers).status == status, (
            path
        )
        for other in (f"{path}/", f"/{path}", f"/%2f{path}", path.upper()):
            assert locked.send(other, data, **headers).status in {status, 404, 307}, other
        for method in ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH"):
            assert locked.ask(method, path, **headers).status in {status, 403, 404, 405}, method
    assert state_of(locked) == before


def test_a_body_is_not_awaited_of_who_is_no_operator(locked: Attacked) -> None:
    for path in OPERATORS:
        with socket.create_connection(("127.0.0.1", locked.port), PATIENCE_S) as link:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
            link.sendall(head.encode())
            assert link.recv(1 << 16).startswith(b"HTTP/1.1 401")


def test_clients_alone_read_the_figures(locked: Attacked) -> None:
    for path in ("/metrics", "/v1/models", "/server_info", "/v1/capabilities", "/openapi.json"):
        assert locked.get(path).status == 401
        assert locked.get(path, Authorization=f"Bearer {OPERATOR}").status == 401
        assert locked.get(path, Authorization=f"Bearer {CLIENT}").status == 200


def test_an_operators_key_takes_json_alone(locked: Attacked, bodies: dict[str, dict[str, Any]]) -> None:
    key = {"Authorization": f"Bearer {OPERATOR}"}
    for path in OPERATORS - {"/reset_prefix_cache"}:  # which takes no body
        data = json.dumps(bodies[path]).encode()
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            assert locked.send(path, data, Content_Type=kind, **key).status == 415


def special(make: Callable[[Path], object], *names: str) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        for name in names:
            (folder / name).unlink(missing_ok=True)
            make(folder / name)

    return replace


FILES = ("model.safetensors", "adapter_model.safetensors")
FOLDERS: dict[str, Callable[[Path], None]] = {
    "a FIFO": special(os.mkfifo, *FILES),
    "a device": special(lambda path: path.symlink_to("/dev/zero"), *FILES),
    "a link to itself": special(lambda path: path.symlink_to(path), *FILES),
    "a folder": special(lambda path: path.mkdir(), *FILES),
    "a header of 2**63 bytes": special(lambda path: path.write_bytes(b"\xff" * 7 + b"\x7f{}"), *FILES),
    "nothing": special(lambda path: path.touch(), *FILES),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_an_operators_hostile_folder_is_a_400_and_holds_nobody_up(
    locked: Attacked, tiny_model_folder: Path, adapter_folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    model, lora = (
        shutil.copytree(source, tmp_path / place)
        for place, source in {"model": tiny_model_folder, "lora": adapter_folders["wide"]}.items()
    )
    FOLDERS[name](model)
    FOLDERS[name](lora)
    before = state_of(locked)
    refused = [
        order(locked, "/update_weights_from_disk", {"model_path": str(model)}),
        order(locked, "/v1/load_lora_adapter", {"lora_name": "b", "lora_path": str(lora)}),
    ]
    assert [reply.status for reply in refused] == [400, 400], [reply.data for reply in refused]
    assert [reply.error["param"] for reply in refused] == ["model_path", "lora_path"]
    assert state_of(locked)[0] == before[0]


@pytest.mark.parametrize(
    "value", ["/dev/zero", "/proc/self/mem", "a\0b", "x" * 100_000, "../" * 1000, "~", "", [], {}, 5, None]
)
def test_a_path_that_is_none_is_a_400(locked: Attacked, value: Any) -> None:
    for path, body in {
        "/update_weights_from_disk": {"model_path": value},
        "/v1/load_lora_adapter": {"lora_name": "b", "lora_path": value},
    }.items():
        reply = order(locked, path, body)
        assert reply.status == 400, reply.data
        assert len(reply.data) < 4096
