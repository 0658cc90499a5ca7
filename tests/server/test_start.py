"""API keys from a file and HTTPS: read before the model is loaded, and again on a signal."""

from __future__ import annotations

import json
import signal
import ssl
import subprocess
import sys
from typing import TYPE_CHECKING

import httpx
import pytest
import trustme

from logprobe.errors import ParameterError
from logprobe.server import ServerSettings
from logprobe.server.app import check_certificate
from logprobe.server.http.keys import Keys
from server_process import PATIENCE_S, Attacked, eventually, serving_process

if TYPE_CHECKING:
    from pathlib import Path


def status(server: Attacked, key: str) -> int:
    return server.get("/v1/models", Authorization=f"Bearer {key}").status


def test_keys_of_a_file_are_read_again_at_sighup(tiny_model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the team\nfirst\n\n second \n")
    with serving_process(tiny_model_folder, "--api-key-file", str(path), "--api-key", "always") as server:
        assert [status(server, key) for key in ("first", "second", "always", "third", "# of the team")] == [
            200, 200, 200, 401, 401,
        ]  # fmt: skip
        path.write_text("third\n")
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: status(server, "third") == 200, "the keys were not read again")
        assert [status(server, key) for key in ("first", "always")] == [401, 200]
        path.write_text("# none\n")
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: "has no keys" in "".join(server.log), "nothing is said")
        assert status(server, "third") == 200
    assert "reloaded the API keys; 2 are valid" in "".join(server.log)
    assert "third" not in "".join(server.log)


@pytest.mark.parametrize(
    ("data", "host", "said"),
    [
        (None, "127.0.0.1", "cannot read .*: No such file"),
        (b"\xff\xfe", "127.0.0.1", "cannot read .*: it is not UTF-8 text"),
        (b"# a comment\n", "127.0.0.1", "has no keys; write one per line"),
        ("schlüssel\n".encode(), "127.0.0.1", "each key must consist of visible ASCII"),
        (b"short\n", "::", "each key must have at least 16 characters"),
        (b"short\n", "server.example", "each key must have at least 16 characters"),
    ],
)
def test_a_file_without_keys_that_serve_is_refused(
    data: bytes | None, host: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ParameterError, match=f"api_key_file: .*{said}"):
        Keys(ServerSettings(host=host, api_key_file=str(path)))


def test_https_is_spoken_with_a_certificate(tiny_model_folder: Path, tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "both.pem"))
    with serving_process(tiny_model_folder, "--ssl-certfile", str(tmp_path / "both.pem")) as server:
        trusted = ssl.create_default_context()
        authority.configure_trust(trusted)
        url = f"https://127.0.0.1:{server.port}/v1/completions"
        body = {"prompt": "the cat", "max_tokens": 3, "stream": True}
        with httpx.stream("POST", url, json=body, verify=trusted, timeout=PATIENCE_S) as reply:
            assert [*reply.iter_lines()][-2] == "data: [DONE]"
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(url, timeout=PATIENCE_S)


def test_a_certificate_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "certificate.pem"
    for data in (None, b"no certificate"):
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(ParameterError, match=r"ssl_certfile: cannot load .*certificate.pem"):
            check_certificate(ServerSettings(ssl_certfile=str(path)))


def test_a_server_whose_port_is_taken_ends_with_one_line(tiny_model_folder: Path) -> None:
    with serving_process(tiny_model_folder) as server:
        command = [
            sys.executable,
            "-m",
            "logprobe",
            "serve",
            str(tiny_model_folder),
            "--port",
            str(server.port),
        ]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    [*_, line] = ended.stderr.splitlines()
    assert f"cannot listen on 127.0.0.1:{server.port} (" in line
    assert json.dumps("Traceback") not in ended.stderr


@pytest.mark.parametrize("data", [b"{", b'{"fields": 5}'])
def test_a_response_template_that_cannot_be_used_ends_it_with_one_line(
    tiny_model_folder: Path, tmp_path: Path, data: bytes
) -> None:
    path = tmp_path / "template.json"
    path.write_bytes(data)
    command = [sys.executable, "-m", "logprobe", "serve", str(tiny_model_folder), "--port", "0"]
    ended = subprocess.run(
        [*command, "--response-template", str(path)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    [*_, line] = ended.stderr.splitlines()
    assert "--response-template" in line
    assert "Traceback" not in ended.stderr
