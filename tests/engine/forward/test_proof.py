"""Token ids of the texts that verify a decoder."""

from __future__ import annotations

from logprobe.engine.forward.proof import special_ids


def test_all_special_ids_of_a_configuration_are_left_out() -> None:
    outer = {"eos_token_id": [2, 7], "pad_token_id": None, "image_token_id": 9, "hidden_size": 64}
    assert special_ids(outer, {"bos_token_id": 1}) == {1, 2, 7, 9}
