"""`logprobe models`: fetch the known models, list what is there, and say where it lies."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from logprobe.errors import LogprobeError
from logprobe.models import DEFAULT_MODEL, KNOWN_MODELS, resolve
from logprobe.models.cache import MANIFEST, entries, entry_size_bytes
from logprobe.models.resolution import known_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

app = typer.Typer(name="models", help="Fetch, list and find models.", no_args_is_help=True)

_Name = Annotated[
    str,
    typer.Argument(
        help="A known name, a local folder, a .gguf file, or a Hugging Face id.", show_default=True
    ),
]


@app.command()
def pull(name: _Name = DEFAULT_MODEL) -> None:
    """Fetch and convert a model unless it is there already, and print its folder."""
    with _one_line_errors():
        typer.echo(resolve(name).folder)


@app.command()
def path(name: _Name = DEFAULT_MODEL) -> None:
    """Print the folder of a model that is on this machine; fetch nothing."""
    with _one_line_errors():
        typer.echo(resolve(name, download=False).folder)


@app.command("list")
def list_(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array instead of a table.")] = False,
) -> None:
    """List the models known by name, and the .gguf files converted so far."""
    with _one_line_errors():
        rows = _rows()
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        state = f"{row['size_bytes'] / 1e6:7.0f} MB  {row['folder']}" if row["folder"] else "not fetched"
        typer.echo(f"{row['name']:<14} {row['title']:<32} {state}")


def _rows() -> list[dict[str, Any]]:
    known = {known_folder(model): model for model in KNOWN_MODELS.values()}
    rows = [
        _row(folder, model.name, model.title, model.license, model.gguf_sha256)
        for folder, model in known.items()
    ]
    for folder in entries():
        if folder not in known:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            source = f"converted from {manifest['source']}"
            rows.append(_row(folder, manifest["name"], source, None, manifest["source_sha256"]))
    return rows


def _row(folder: Path, name: str, title: str, license_: str | None, sha256: str) -> dict[str, Any]:
    is_here = folder.is_dir()
    return {
        "name": name,
        "title": title,
        "license": license_,
        "source_sha256": sha256,
        "folder": str(folder) if is_here else None,
        "size_bytes": entry_size_bytes(folder) if is_here else None,
    }


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except LogprobeError as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from error
