"""Print the tables of tested and unsupported model families, from tests/families, for docs/models.md."""

from __future__ import annotations

import sys
from pathlib import Path

import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from families.outcomes import NATIVE, REFUSED, TRANSFORMERS, UNBUILT
from families.rows import RIGHT


def text() -> str:
    """Return the tables."""
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
            f"Tested with transformers {_minor(transformers.__version__)}.\n",
            "| family | `model_type` | layers |",
            "| --- | --- | --- |",
            *rows,
            "\n## Other families, tested in their default variant\n",
            'The tests score texts in chunks and generate on a cached prefix, with `weights="checkpoint"`.\n',
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
    print(text(), end="")
