"""`logprobe models`: fetch the known models, list and show what is there, and remove it."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from logprobe.cli.options import MODEL_HELP, complete_model
from logprobe.cli.tables import console, print_facts
from logprobe.errors import LogprobeError, ModelNotFoundError
from logprobe.models import DEFAULT_MODEL, KNOWN_MODELS, resolve
from logprobe.models.cache import MANIFEST, entries, entry_size_bytes, remove_entry
from logprobe.models.resolution import known_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

app = typer.Typer(name="models", help="Fetch, list, show and remove models.", no_args_is_help=True)

_Name = Annotated[str, typer.Argument(help=MODEL_HELP, show_default=True, autocompletion=complete_model)]
_Here = Annotated[
    str,
    typer.Argument(
        help="A known name, a converted .gguf file, or a folder in the cache.", autocompletion=complete_model
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
# Of a model's config.json, under the names that most families share.
_SHAPE = {
    "model_type": "family",
    "num_hidden_layers": "layers",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "num_key_value_heads": "key/value heads",
    "vocab_size": "vocabulary",
    "max_position_embeddings": "context",
}


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
def list_(*, as_json: _Json = False) -> None:
    """List the models known by name, and the .gguf files converted so far."""
    with _one_line_errors():
        rows = _rows()
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    # A terminal is too narrow for the folders, which `path` and `show` tell.
    num_columns = 3 if console().is_terminal else 4
    print_facts([[row["name"], row["title"], *_state(row)][:num_columns] for row in rows])


def _state(row: dict[str, Any]) -> list[str]:
    return [f"{row['size_bytes'] / 1e6:.0f} MB", row["folder"]] if row["folder"] else ["not fetched", ""]


@app.command()
def show(name: _Name = DEFAULT_MODEL, *, as_json: _Json = False) -> None:
    """Print what a model on this machine is: shape, license, source, size, folder; load nothing."""
    with _one_line_errors():
        facts = _facts(name)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        print_facts([[fact, str(value)] for fact, value in facts.items()])


@app.command()
def rm(
    name: _Here, *, yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before.")] = False
) -> None:
    """Remove a model from the cache, and print its folder; it can be fetched again. Others' files stay."""
    with _one_line_errors():
        folder = _entry(name)
    size = f"{entry_size_bytes(folder) / 1e6:.0f} MB"
    if not (yes or typer.confirm(f"remove {folder} ({size})?", err=True)):
        raise typer.Exit(1)
    with _one_line_errors():
        remove_entry(folder)
    typer.echo(folder)


def _facts(name: str) -> dict[str, Any]:
    folder = resolve(name, download=False).folder
    known = KNOWN_MODELS.get(name)
    facts: dict[str, Any] = {"model": name}
    if known is not None:
        facts |= {"title": known.title, "license": known.license}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= config.get("text_config", {})
    facts |= {title: config[key] for key, title in _SHAPE.items() if config.get(key) is not None}
    if (folder / MANIFEST).is_file():
        facts["source"] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["source"]
    return facts | {"size": f"{entry_size_bytes(folder) / 1e6:.0f} MB", "folder": str(folder)}


def _entry(name: str) -> Path:
    """The folder of the cache that a name stands for.

    Raises:
        ModelNotFoundError: it is not in the cache, or not the cache's to remove.
    """
    kept = {row["folder"]: row["name"] for row in _rows() if row["folder"]}
    known = [folder for folder, stem in kept.items() if stem == name]
    folder = str(Path(name).expanduser().resolve())
    if known or folder in kept:
        return Path(known[0] if known else folder)
    here = ", ".join(kept.values()) or "nothing"
    raise ModelNotFoundError(
        f"no {name!r} in the cache; there is {here}, and nothing but the cache's own files is removed"
    )


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
