"""With the native decoder a row has the same bits for any batching, chunking and caching."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest

from families.rows import RIGHT, Row
from families.tiny import model_of
from families.trials import GREEDY, SCORED, Driven, load, prompts
from logprobe.engine.forward.cpu import attention

if TYPE_CHECKING:
    from logprobe.text.edge import TextEdge

NATIVE = [row for row in RIGHT if row.layers == "native"]


def bits(record: Any, start: int = 0) -> bytes:
    rows = record[start:]
    numbers = (rows.chosen_entries().logprobs, rows.top_entries().logprobs)
    return b"".join(np.asarray(part, np.float32).tobytes() for part in numbers)


@pytest.mark.parametrize("row", NATIVE, ids=lambda row: row.name)
def test_a_row_has_the_same_bits_in_every_layout(row: Row, text: TextEdge) -> None:
    forward = load(model_of(row.kind, **row.special), "checkpoint", batch_invariant=True)
    texts = prompts(forward.vocab_size)
    whole = {"max_num_batched_tokens": 128, "max_num_seqs": 8}

    def scored(engine: Driven) -> dict[str, bytes]:
        outputs = engine.run(*((ids, SCORED) for ids in texts.values()))
        return {name: bits(one.prompt_logprobs, 1) for name, one in zip(texts, outputs, strict=True)}

    alone = {
        name: bits(Driven(forward, text, **whole).run((ids, SCORED))[0].prompt_logprobs, 1)
        for name, ids in texts.items()
    }
    engine = Driven(forward, text, **whole)
    assert scored(engine) == alone, "together"
    assert scored(engine) == alone, "kept"
    assert scored(Driven(forward, text, max_num_batched_tokens=7, max_num_seqs=4)) == alone, "in chunks of 7"
    with mock.patch.object(attention, "is_short", return_value=False):
        pieces = Driven(forward, text, max_num_batched_tokens=23, max_num_seqs=4)
        assert scored(pieces) == alone, "by the chunk kernel"

    drawn = Driven(forward, text, **whole).run(*((ids, GREEDY) for ids in texts.values()))
    for ids, one in zip(texts.values(), drawn, strict=True):
        grown = [*ids, *one.outputs[0].token_ids]
        if forward.rope_boundary is not None and len(ids) < forward.rope_boundary <= len(grown):
            continue  # the whole text uses other frequencies, hence other numbers, also in transformers
        [again] = Driven(forward, text, **whole).run((grown, SCORED))
        assert bits(one.outputs[0].logprobs) == bits(again.prompt_logprobs, len(ids)), "drawn"
