"""`logprobe verify`: verify stored replies by the digests of their rows."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from logprobe.analysis.verification import TOLERANCE, read_replies
from logprobe.analysis.verification import verify as verify_replies
from logprobe.cli.options import JsonOption, ModelFlags


def verify(
    file: Annotated[
        Path,
        typer.Argument(
            help="JSON file with a reply or a list of replies, or with one reply per line.",
            exists=True,
            dir_okay=False,
        ),
    ],
    *,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Mean difference in nats up to which a reply matches.")
    ] = TOLERANCE,
    as_json: JsonOption = False,
    model: ModelFlags,
) -> None:
    """Verify that stored replies were computed with a model's weights.

    The replies must be from /v1/completions or /v1/chat/completions, to requests with `digest: true`. The
    next-token distributions at their tokens are computed again with --model, and compared with the digests.
    Prints one line per choice. The exit code is 1 if a choice does not match.

    Examples:
        logprobe verify reply.json --model smollm2
    """
    replies = read_replies(file)
    with model.open() as llm:
        results = verify_replies(llm, replies, tolerance=tolerance)
    for result in results:
        if as_json:
            from logprobe.analysis.io.files import json_line

            typer.echo(json_line(asdict(result) | {"is_match": result.is_match}))
        else:
            typer.echo(str(result))
    if not all(result.is_match for result in results):
        raise typer.Exit(1)
