"""`logprobe models`: fetch, list, show, export and remove models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from logprobe.cli.command import Command
from logprobe.cli.options import MODEL_HELP, complete_model
from logprobe.cli.tables import console, print_facts
from logprobe.errors import ModelNotFoundError
from logprobe.models import DEFAULT_MODEL, KNOWN_MODELS, resolve
from logprobe.models.cache import MANIFEST, entries, entry_size_bytes, in_words, remove_entry
from logprobe.models.resolution import known_folder
from logprobe.models.stored.disk import left_by_others, of_folder

if TYPE_CHECKING:
    from logprobe.models.stored.disk import OnDisk

app = typer.Typer(name="models", help="Fetch, list, show, export and remove models.", no_args_is_help=True)

_Name = Annotated[str, typer.Argument(help=MODEL_HELP, show_default=True, autocompletion=complete_model)]
_Here = Annotated[
    str,
    typer.Argument(help="A name from `logprobe models list`, or a folder.", autocompletion=complete_model),
]
_Prepare = Annotated[
    bool, typer.Option("--prepare", help="Also pack and verify the model now, instead of at its first use.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
# Keys of a model's config.json, as most families name them, and their titles.
_SHAPE = {
    "model_type": "family",
    "num_hidden_layers": "layers",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "num_key_value_heads": "key/value heads",
    "vocab_size": "vocabulary",
    "max_position_embeddings": "context",
}


@app.command(cls=Command)
def pull(name: _Name = DEFAULT_MODEL, *, prepare: _Prepare = False) -> None:
    """Fetch a model unless it is already on this machine, and print its folder.

    Examples:
        logprobe models pull smollm2
        logprobe models pull HuggingFaceTB/SmolLM2-135M-Instruct --prepare
    """
    files = resolve(name)
    if prepare:
        from logprobe import LLM

        LLM(files.name).close()
    typer.echo(files.folder)


@app.command(cls=Command)
def path(name: _Name = DEFAULT_MODEL) -> None:
    """Print the folder of a model on this machine, without fetching anything.

    Examples:
        logprobe models path smollm2
    """
    typer.echo(resolve(name, download=False).folder)


@app.command("list", cls=Command)
def list_(*, as_json: _Json = False) -> None:
    """List known models, converted .gguf files, and cached data of other models.

    Sizes on disk are listed separately for model files, packed weights (panels) and verification records.

    Examples:
        logprobe models list --json
    """
    models = _models()
    if as_json:
        typer.echo(json.dumps([model.row() for model in models], indent=2))
        return
    # A terminal is too narrow for the folders; `path` and `show` print them.
    num_columns = 3 if console().is_terminal else 4
    print_facts([[model.name, model.title, *model.state()][:num_columns] for model in models])


@app.command(cls=Command)
def show(name: _Name = DEFAULT_MODEL, *, as_json: _Json = False) -> None:
    """Print the shape, license, source, sizes and folder of a model on this machine, without loading it.

    Examples:
        logprobe models show smollm2
    """
    facts = _facts(name)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        print_facts([[fact, str(value)] for fact, value in facts.items()])


@app.command(cls=Command)
def rm(
    name: _Here,
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: _Json = False,
) -> None:
    """Remove a model, its packed weights and verification records from the cache; print the removed folders.

    Everything that is removed can be fetched or created again. Files outside the cache, such as your own
    folders or the Hugging Face cache, are never removed.

    Examples:
        logprobe models rm smollm2 --yes
    """
    removable = _removable(name)
    size_bytes = sum(map(entry_size_bytes, removable))
    more = f" and {len(removable) - 1} more" if len(removable) > 1 else ""
    if not (yes or typer.confirm(f"remove {removable[0]}{more} ({in_words(size_bytes)})?", err=True)):
        raise typer.Exit(1)
    for entry in removable:
        remove_entry(entry)
        if not as_json:
            typer.echo(entry)
    if as_json:
        typer.echo(json.dumps({"removed": [*map(str, removable)], "size_bytes": size_bytes}, indent=2))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """A known model, a converted .gguf model, or another model with data in the cache."""

    name: str
    title: str
    license: str | None = None
    source_sha256: str | None = None
    disk: OnDisk

    @property
    def is_left(self) -> bool:
        """True if the cache has only packed weights or verification records, not the model itself."""
        return self.source_sha256 is None

    def row(self) -> dict[str, Any]:
        """Return the entry for JSON output."""
        disk = self.disk
        is_here = disk.folder is not None or disk.entries
        return {
            "name": self.name,
            "title": self.title,
            "license": self.license,
            "source_sha256": self.source_sha256,
            "folder": None if disk.folder is None else str(disk.folder),
            "size_bytes": disk.size_bytes if is_here else None,
            "files_bytes": disk.files_bytes if is_here else None,
            "panels_bytes": disk.panels_bytes if is_here else None,
            "records_bytes": disk.records_bytes if is_here else None,
        }

    def state(self) -> list[str]:
        """Return the model's sizes on disk as text, and its folder."""
        is_missing = self.disk.folder is None and not self.is_left
        sizes = [f"{what} {size}" for what, size in _sizes(self.disk).items()]
        return [", ".join([*["not fetched"] * is_missing, *sizes]), str(self.disk.folder or "")]


def _models() -> list[_Model]:
    known = {known_folder(model): model for model in KNOWN_MODELS.values()}
    models = [
        _Model(
            name=model.name,
            title=model.title,
            license=model.license,
            source_sha256=model.gguf_sha256,
            disk=of_folder(folder),
        )
        for folder, model in known.items()
    ]
    converted = [folder for folder in entries() if folder not in known]
    for folder in converted:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        models.append(
            _Model(
                name=manifest["name"],
                title=f"read from {manifest['source']}",
                source_sha256=manifest["source_sha256"],
                disk=of_folder(folder),
            )
        )
    taken = {model.name for model in models}
    for name, disk in left_by_others([*known, *converted]).items():
        # If a folder has the same name as a model in the cache, `resolve` requires the prefix.
        models.append(_Model(name=f"./{name}" if name in taken else name, title=f"left by {name}", disk=disk))
    return models


def _sizes(disk: OnDisk) -> dict[str, str]:
    """Return the nonzero sizes on disk as text, by kind of data."""
    sizes = {"files": disk.files_bytes, "panels": disk.panels_bytes, "records": disk.records_bytes}
    return {what: in_words(size) for what, size in sizes.items() if size}


@app.command(cls=Command)
def export(
    name: _Name,
    folder: Annotated[Path, typer.Argument(help="Output folder; must not exist.")],
    *,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Data type of the written weights.")
    ] = "float32",
) -> None:
    """Convert a GGUF model to safetensors, for other programs, and print the folder.

    Examples:
        logprobe models export model.gguf ./model --dtype bfloat16
    """
    from logprobe.models.export import export_model

    export_model(resolve(name), folder, dtype=dtype)
    typer.echo(folder)


def _facts(name: str) -> dict[str, Any]:
    try:
        folder = resolve(name, download=False).folder
    except ModelNotFoundError:
        left = next((model for model in _models() if model.name == name and model.is_left), None)
        if left is None:
            raise
        return {"model": name, "title": left.title, **_sizes(left.disk)}
    known = KNOWN_MODELS.get(name)
    facts: dict[str, Any] = {"model": name}
    if known is not None:
        facts |= {"title": known.title, "quantization": known.quantization, "license": known.license}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= config.get("text_config", {})
    facts |= {title: config[key] for key, title in _SHAPE.items() if config.get(key) is not None}
    if (folder / MANIFEST).is_file():
        facts["source"] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["source"]
    disk = of_folder(folder)
    return facts | {"size": in_words(disk.size_bytes), **_sizes(disk), "folder": str(folder)}


def _removable(name: str) -> tuple[Path, ...]:
    """Return a model's entries in the cache, of which there is at least one.

    Raises:
        ModelNotFoundError: the cache has no entries for the model.
    """
    here = [model for model in _models() if model.disk.entries]
    folder = Path(name).expanduser()
    for model in here:
        if name == model.name or model.disk.folder == folder.resolve():
            return model.disk.entries
    if name and folder.is_dir() and (left := of_folder(folder).entries):
        return left
    names = ", ".join(model.name for model in here) or "nothing"
    raise ModelNotFoundError(
        f"{name!r} is not in the cache, which has {names}; files outside the cache are never removed"
    )
