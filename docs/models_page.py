"""Print docs/models.md from the table of variants in tests/families."""

from __future__ import annotations

import sys
from pathlib import Path

import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from families.outcomes import NATIVE, REFUSED, TRANSFORMERS, UNBUILT
from families.rows import RIGHT
from logprobe.models.stored.store import MAX_RECORDS

HEADER = """# Models

This page lists which causal language models of transformers {version} the native engine can run. To see how
the engine runs your model:

```sh
logprobe info MODEL
```

The engine verifies every model that it loads. It runs the model in transformers to find its decoder, and
reads each layer's attention window from the mask that transformers builds. It then compares its own logits
with those of transformers for every implementation of attention. The compared positions are the first ones,
the last ones of the context, and those around each length at which the rotary frequencies may change. If the
native decoder runs the model on a CPU, the first load stores the logits, and later loads only compare with
them. A model that the engine cannot run is rejected with `UnsupportedModelError`, which states the reason;
`engine='vllm'` may be able to run it.

## Decoders

The column `layers` of the tables below names the decoder that runs a model with `weights="published"`. This
setting keeps the weights in memory in the precision of the model's file. It is the default for float32 on a
CPU, if there are native kernels for that CPU.

- **native**: this library's own decoder runs the model; on a GPU, the [GPU decoder](gpu.md) does. Each family
  has an entry in `engine/forward/families.py`. The transformers decoder runs a model instead if the entry
  does not cover one of its tensors or a configuration key with a non-default value, or if the native
  decoder's logits differ.
- **transformers**: transformers' own modules run the model, with this library's attention and KV cache.

The transformers decoder also runs every model with `weights="plain"` (the weights as transformers loads them)
or with a 16-bit `dtype`. `logprobe info MODEL` and the log state the decoder and the reason.

With longrope, the rotary frequencies depend on the length of the text. The engine uses the frequencies that a
single forward pass over the whole text would use. When a text grows past the length at which the frequencies
change, the engine recomputes it from the start.

`engine/forward/reference/` is a second implementation of the native families, in float64 NumPy, written to be
easy to read. Its entry point is `logits(config, weights, token_ids)`. The tests compare it with transformers
in float64, to within 1e-10 of the largest logit, and compare the native decoder with it. At load, it is
used to verify a model where transformers is not installed; only the native decoder can then run it.

## What lies on the disk

The first load of a model stores two kinds of files that make later loads faster. They are in
`~/.cache/logprobe`, or in the folder that `LOGPROBE_HOME` names:

- **Panels** are the weights, repacked for the CPU. They are about as large as the model's file: 2 bytes per
  weight if bfloat16 or float16 represents the weights exactly, otherwise 4. Weights from a `.gguf` file keep
  the size of their quantized blocks. All processes map the same panels, so memory holds them once.
- **Records** hold the result of the verification and a few of transformers' logits. Only models that run on
  the native decoder have records. A record takes about a megabyte, or more if the vocabulary is large. After
  an update of this library or of a library that it uses, the next load creates a new record. At most
  {most_records} records are kept per model.

Three commands manage these files:

- `logprobe models list` shows how much disk space the files, panels and records of each model take. A model
  from one of your folders or from the Hugging Face cache has the title "left by NAME". Folders with the same
  name share a line.
- `logprobe models show MODEL` shows the sizes for one model. For a folder, it counts this folder alone.
- `logprobe models rm MODEL` removes what the cache has of a model: downloaded or converted files, panels,
  records, and incomplete files of interrupted commands. It never removes your own folders or files of the
  Hugging Face cache. The next load downloads or creates the removed files again.

## Tested variants

`tests/families/` compares each variant below with transformers, on tiny random models. With
`weights="published"`, log-probabilities agree with those of transformers in float32 to within 2e-4 nats. The
tests score each text alone, in a batch, in chunks and with a cached prefix, and generate text. Some texts are
shorter than the attention window and than the length at which the rotary frequencies change, and some are
longer. With `weights="plain"`, the tests score texts in chunks and generate on a cached prefix.
"""


def page() -> str:
    """Return the text of the page."""
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
            "| family | `model_type` | layers |",
            "| --- | --- | --- |",
            *rows,
            "\n## Other families, tested in their default variant\n",
            'The tests score texts in chunks and generate on a cached prefix, with `weights="published"`.\n',
            "| `model_type` | layers |",
            "| --- | --- |",
            *others,
            "\n## Unsupported families\n",
            "| why | `model_type` |",
            "| --- | --- |",
            *refused,
            f"\nNot tested (no tiny model could be built): {_named(UNBUILT)}. Most wrap a family above.\n",
        ]
    )


def _named(kinds: list[str]) -> str:
    return ", ".join(f"`{kind}`" for kind in kinds)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


if __name__ == "__main__":
    print(page(), end="")
