"""docs/models.md from the table that the tests of families prove."""

from __future__ import annotations

import sys
from pathlib import Path

import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from families.outcomes import NATIVE, REFUSED, TRANSFORMERS, UNBUILT
from families.rows import RIGHT
from logprobe.models.stored.store import MAX_RECORDS

HEADER = """# Models

What the native engine does with each family of causal language models that transformers {version} knows.
This page is written by `python docs/models_page.py`, from the table that `tests/families/` proves on tiny
random models: each variant below gives transformers' float32 log-probabilities to 2e-4 nats for a text
alone, in a batch, in chunks, on cached prefixes and while it grows, below, across and beyond its window and
the length at which its rotary frequencies change, with published weights; and chunked and growing on what
is cached with plain ones.

At load every model is watched, then proven: its decoder is found by watching it run, each layer's window
is read from the mask that transformers makes for it, and the logits of every way of attention are compared
with the model's own, at its first positions, at its last and across each length at which they may change.
`logprobe info MODEL` shows the outcome. A model that cannot be run so is refused with
`UnsupportedModelError`; `engine='vllm'` may run it.

`engine/forward/reference/` is a second decoder for the families of the native one, in NumPy and float64,
written to be read: `logits(config, weights, token_ids)`. The tests compare it with transformers in float64,
to 1e-10 of the largest logit, and the native decoder with it. No model is verified against it at load yet.

- **native**: with published weights, by the native decoder, a row of `engine/forward/families.py`. A model of
  such a family runs so only where each key of its configuration and each of its tensors is known there. On a
  GPU such a family runs by the [GPU decoder](gpu.md).
- **transformers**: by the transformers decoder (transformers' modules), on published weights where the native
  kernels run. So does every model with `weights="plain"` or with a `dtype` of 16 bits. `logprobe info MODEL`
  and the log say why.
- Frequencies that change with the length of a text (longrope) are those of one forward pass over the whole
  text. A text that outgrows the short ones is computed again from its start.

## What lies on the disk

Beside a model's files, the first load leaves two things for the next ones, in `~/.cache/logprobe` or where
`LOGPROBE_HOME` says:

- **panels**, its weights as the processor reads them, about as large as in their published form: 2 bytes a
  weight where bfloat16 or float16 holds them, those of its blocks from a `.gguf` file. All processes map
  them, so that they are in memory once.
- **records** of what was proven of it, with a few of transformers' logits: about a megabyte each, some more
  where the vocabulary is large. New versions of this library or of those below it make new ones; a model
  keeps at most {most_records}.

`logprobe models list` says what files, panels and records take of each model, also of folders and of the
hub's models, which are listed as "left by" their names. `logprobe models show MODEL` says it of one, and of a
folder exactly: folders of one name share a line of the list. `logprobe models rm MODEL` removes the files
that the cache keeps, panels, records, and what a killed command left half made; of your own folders and of
the hub's files it removes nothing. All of it is made again when the model is loaded again.
"""


def page() -> str:
    """The page as it should stand."""
    listed = {row.kind for row in RIGHT}
    rows = [f"| {row.name} | `{row.kind}` | {row.layers} |" for row in RIGHT]
    others = [
        f"| `{kind}` | {'native' if kind in NATIVE else 'transformers'} |"
        for kind in sorted([*NATIVE, *TRANSFORMERS])
        if kind not in listed
    ]
    refused = [f"| {reason} | {_named(kinds)} |" for reason, kinds in REFUSED.items()]
    return "\n".join(
        [
            HEADER.format(version=_minor(transformers.__version__), most_records=MAX_RECORDS),
            "## Proven variants\n",
            "| family | `model_type` | layers |",
            "| --- | --- | --- |",
            *rows,
            "\n## Other families that are right in their default variant\n",
            "| `model_type` | layers |",
            "| --- | --- |",
            *others,
            "\n## Refused\n",
            "| why | `model_type` |",
            "| --- | --- |",
            *refused,
            f"\nNo tiny model could be made of {_named(UNBUILT)}; most are wrappers of a family above.\n",
        ]
    )


def _named(kinds: list[str]) -> str:
    return ", ".join(f"`{kind}`" for kind in kinds)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


if __name__ == "__main__":
    print(page(), end="")
