"""Row digests beside transformers' own rows, and how often honest and other replies are told apart."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe import LLM, SamplingParams
from logprobe.analysis import verification, verify
from logprobe.analysis.verification import TOLERANCE, read_replies
from logprobe.cli.app import run
from logprobe.errors import InputError, ParameterError
from logprobe.records.digests import MAX_CODE, NUM_IDS, STEP, codes_of, digest_ids, read_digests
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logprobe.engine.request import RequestOutput

PROMPTS = [[5 + number, 60, 7 * number % 90] for number in range(12)]


def params(**more: Any) -> SamplingParams:
    asked = {"max_tokens": 12, "seed": 3, "logprobs": 0, "digest": True, "ignore_eos": True}
    return SamplingParams(**(asked | more))


def reply_of(output: RequestOutput) -> dict[str, Any]:
    """An output as the server writes it."""
    assert output.info is not None
    return {
        "id": output.request_id,
        "prompt_token_ids": output.prompt_token_ids,
        "logprobs_info": output.info.to_dict(),
        "choices": [
            {"index": one.index, "token_ids": one.token_ids, "digests": [d.hex() for d in one.digests or []]}
            for one in output.outputs
        ],
    }


@pytest.fixture(scope="module")
def replies(tiny_llm: LLM) -> list[dict[str, Any]]:
    return [reply_of(output) for output in tiny_llm.generate(PROMPTS, params(n=2))]


def test_digests_are_those_of_transformers_rows(tiny_llm: LLM, tiny_model_folder: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float64)
    for output in tiny_llm.generate(PROMPTS[:3], params(temperature=0.7, top_k=20)):
        [completion] = output.outputs
        assert completion.digests is not None
        assert {*map(len, completion.digests)} == {16}
        ids = output.prompt_token_ids + completion.token_ids
        with torch.no_grad():
            rows = model(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()
        rows = rows[len(output.prompt_token_ids) - 1 : -1]
        assert output.info is not None
        found = read_digests(completion.digests, output.info)
        for position, row in enumerate(rows):
            chosen = digest_ids(np.array(output.prompt_token_ids), position, len(row))
            np.testing.assert_allclose(found[position] * STEP, -row[[*chosen]], atol=0.6 * STEP)
        assert completion.logprobs is not None
        assert completion.logprobs.given is None, "the sampled values themselves are not reported"


def test_own_replies_are_identical(tiny_llm: LLM, replies: list[dict[str, Any]]) -> None:
    found = verify(tiny_llm, replies)
    assert len(found) == 2 * len(replies)
    for one in found:
        assert (one.num_tokens, one.num_identical, one.mean_difference) == (12, 12, 0.0)
        assert one.is_match
        assert one.has_same_version


def test_many_choices_are_verified_in_batches(
    tiny_llm: LLM, replies: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = json.loads(json.dumps(replies))
    for number, reply in enumerate(changed):
        reply["choices"][number % 2]["digests"][number] = "00" * 16
    want = verify(tiny_llm, changed)
    sizes = []
    score = LLM.score

    def spy(llm: LLM, texts: Any, **more: Any) -> Any:
        sizes.append(len(texts))
        return score(llm, texts, **more)

    monkeypatch.setattr(LLM, "score", spy)
    monkeypatch.setattr(verification, "BATCH", 7)
    assert verify(tiny_llm, changed) == want
    assert sizes == [7, 7, 7, 3]
    assert [one.num_identical for one in want[:4]] == [11, 12, 12, 11]


@pytest.mark.parametrize(
    "asked",
    [
        {"logprobs_mode": "both", "top_k": 3, "temperature": 0.5},
        {"n": 1, "best_of": 3},
        {"logprobs": 4, "entropy": True},
        {"response_format": {"type": "regex", "regex": "[a-z ]+"}},
    ],
)
def test_other_parameters_do_not_change_what_is_verified(tiny_llm: LLM, asked: Any) -> None:
    outputs = tiny_llm.generate(PROMPTS[:2], params(**asked))
    assert all(one.num_identical == one.num_tokens > 0 for one in verify(tiny_llm, [*map(reply_of, outputs)]))


@pytest.mark.parametrize(
    "asked",
    [
        {"logprob_token_ids": [5, 9]},
        {"logprob_token_ids": [5], "prompt_logprobs": 1, "logprobs_mode": "both"},
        {"logprob_token_ids": [[4], [], [8, 9, 3]]},
    ],
)
def test_requested_ids_are_reported_beside_digests(tiny_llm: LLM, asked: Any) -> None:
    plain, output = tiny_llm.generate([PROMPTS[0]] * 2, [params(**asked, digest=False), params(**asked)])
    assert verify(tiny_llm, reply_of(output))[0].num_identical == 12
    for name in ("logprobs", "processed_logprobs"):
        want, got = getattr(plain.outputs[0], name), getattr(output.outputs[0], name)
        assert got == want
        assert (got is None) or got.given == want.given
    if plain.prompt_logprobs is not None:
        assert output.prompt_logprobs.given == plain.prompt_logprobs.given


def test_neighbours_without_digests_have_none(tiny_llm: LLM) -> None:
    asked = [params(), params(digest=False), params(digest=False, logprob_token_ids=[5, 6])]
    first, second, third = tiny_llm.generate([PROMPTS[0]] * 3, asked)
    assert second.outputs[0].digests is third.outputs[0].digests is None
    assert third.outputs[0].logprobs is not None
    assert third.outputs[0].logprobs.given is not None
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == third.outputs[0].token_ids


def test_a_change_of_anything_is_noticed(tiny_llm: LLM, replies: list[dict[str, Any]]) -> None:
    def matches(change: Any) -> bool:
        reply = json.loads(json.dumps(replies[0]))
        change(reply)
        return verify(tiny_llm, reply)[0].is_match

    def token(reply: Any) -> None:
        reply["choices"][0]["token_ids"][0] ^= 1

    def digest(reply: Any) -> None:
        reply["choices"][0]["digests"][4] = "00" * 16

    def prompt(reply: Any) -> None:
        reply["prompt_token_ids"][1] ^= 1

    def version(reply: Any) -> None:
        reply["logprobs_info"]["weight_version"] = "another"

    def order(reply: Any) -> None:
        reply["choices"][0]["digests"].reverse()

    assert matches(lambda _: None)
    for change in (token, digest, prompt, version, order):
        assert not matches(change), change.__name__


@pytest.fixture(scope="module")
def other_arithmetic(tiny_model_folder: Path) -> Iterator[LLM]:
    pytest.importorskip("torch")
    with LLM(str(tiny_model_folder), weights="plain", kv_cache_memory_bytes=1 << 21) as llm:
        yield llm


def rounded_folder(source: Path, folder: Path, levels: int) -> Path:
    """A copy of a model whose matrices have `levels` values a row, as quantised weights do."""
    from safetensors.numpy import load_file, save_file

    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(source / "model.safetensors")
    for name, weight in weights.items():
        if weight.ndim == 2:
            step = (weight.max(1, keepdims=True) - weight.min(1, keepdims=True)) / (levels - 1)
            weights[name] = (np.rint(weight / step) * step).astype(weight.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_no_false_alarm_for_another_arithmetic_and_no_miss_for_other_weights(
    tiny_llm: LLM, other_arithmetic: LLM, tiny_model_folder: Path, tmp_path: Path
) -> None:
    """Brute force over many replies: transformers' float32 modules match, 4-bit weights do not."""
    prompts = [[5 + number % 80, 6 + number * 7 % 80] for number in range(100)]

    def differences(llm: LLM) -> list[float]:
        found = verify(tiny_llm, [reply_of(output) for output in llm.generate(prompts, params())])
        return [one.mean_difference for one in found]

    assert max(differences(other_arithmetic)) < TOLERANCE / 10
    with LLM(str(rounded_folder(tiny_model_folder, tmp_path / "int4", 16))) as int4:
        assert min(differences(int4)) > TOLERANCE


def test_an_adapter_is_verified_with_its_version(adapter_folders: Any, tiny_model_folder: Path) -> None:
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21) as llm:
        llm.add_lora("wide", adapter_folders["wide"])
        reply = reply_of(llm.with_lora("wide").generate([PROMPTS[0]], params())[0])
        [found] = verify(llm, reply)
        assert found.num_identical == found.num_tokens
        assert found.has_same_version
        retrained = reply | {"logprobs_info": reply["logprobs_info"] | {"lora_version": "sha256:0"}}
        assert not verify(llm, retrained)[0].has_same_version
        reply["logprobs_info"]["lora"] = None
        assert not verify(llm, reply)[0].is_match


def test_codes_are_rounded_and_bounded() -> None:
    logprobs = np.array([0.0, -STEP * 2.4, -1.0, -63.0, -64.5, -np.inf], np.float32)
    assert codes_of(logprobs).tolist() == [0, 2, 1024, 64512, MAX_CODE, MAX_CODE]
    ids = digest_ids(np.array([3, 4]), 7, 100)
    assert len(ids) == NUM_IDS
    assert all(0 <= one < 100 for one in ids)
    assert ids == digest_ids(np.array([3, 4]), 7, 100) != digest_ids(np.array([3, 4]), 8, 100)
    assert ids != digest_ids(np.array([4, 4]), 7, 100)


@pytest.mark.parametrize(
    "asked",
    [
        {"logprobs": None},
        {"logprobs_mode": "processed_logprobs"},
        {"digest": 1},
    ],
)
def test_digests_need_raw_rows_of_their_own(asked: Any) -> None:
    with raises(ParameterError, parameter="digest"):
        params(**asked)


@pytest.mark.parametrize(
    "change",
    [
        {"choices": [{"index": 0, "token_ids": [5]}]},
        {"choices": [{"index": 0, "token_ids": [5], "digests": ["zz"]}]},
        {"choices": [{"index": 0, "token_ids": [5], "digests": ["00"]}]},
        {"choices": [{"index": 0, "token_ids": [5, 6], "digests": ["00" * 16]}]},
        {"choices": []},
        {"choices": [{"index": 0, "token_ids": [], "digests": []}]},
        {"choices": [{"index": 1, "token_ids": [5], "digests": ["00" * 16]}]},
        {"prompt_token_ids": None},
        {"prompt_token_ids": [5, 1 << 70]},
        {"choices": [{"index": 0, "token_ids": [-1], "digests": ["00" * 16]}]},
        {"logprobs_info": None},
        {"logprobs_info": {"unknown": 1}},
    ],
)
def test_replies_without_digests_are_refused(
    tiny_llm: LLM, replies: list[dict[str, Any]], change: dict[str, Any]
) -> None:
    with pytest.raises(InputError):
        verify(tiny_llm, replies[0] | change)
    with pytest.raises(InputError):
        verify(tiny_llm, [replies[1], replies[0] | change])


def test_reordered_choices_are_refused(tiny_llm: LLM, replies: list[dict[str, Any]]) -> None:
    """The choices after the first of a prompt do not state their prompt."""
    with pytest.raises(InputError):
        verify(tiny_llm, replies[0] | {"choices": replies[0]["choices"][::-1]})


def test_each_choice_is_verified_with_its_own_prompt(tiny_llm: LLM, replies: list[dict[str, Any]]) -> None:
    """A reply to two prompts has the prompt's ids at the first choice of each."""
    choices = []
    for reply in replies[:2]:
        first, second = json.loads(json.dumps(reply["choices"]))
        choices += [first | {"prompt_token_ids": reply["prompt_token_ids"]}, second]
    whole = replies[0] | {
        "choices": [choice | {"index": index} for index, choice in enumerate(choices)],
        "prompt_token_ids": None,
    }
    assert [one.num_identical for one in verify(tiny_llm, whole)] == [12] * 4


def test_no_replies_are_no_match(tiny_llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        verify(tiny_llm, [])
    for text in ("", "\n", "[]"):
        (tmp_path / "replies.json").write_text(text)
        with pytest.raises(InputError):
            verify(tiny_llm, read_replies(tmp_path / "replies.json"))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=re.escape(str(tmp_path))):
        read_replies(tmp_path / "missing.json")
    monkeypatch.setattr(verification, "MAX_FILE_BYTES", 100)
    with pytest.raises(InputError, match="more than 100 bytes"):
        read_replies(Path("/dev/zero"))


def test_a_file_may_have_a_list_of_replies(replies: list[dict[str, Any]], tmp_path: Path) -> None:
    for text in (json.dumps(replies, indent=1), "\n\n".join(map(json.dumps, replies))):
        (tmp_path / "replies.json").write_text(text)
        assert read_replies(tmp_path / "replies.json") == json.loads(json.dumps(replies))


def test_the_command_verifies_files(
    replies: list[dict[str, Any]], tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = tmp_path / "replies.jsonl", ("--model", str(tiny_model_folder))
    path.write_text("\n".join(map(json.dumps, replies[:2])))
    assert run(("verify", str(path), "--json", *model)) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["num_identical"] for row in rows] == [12] * 4
    changed = json.loads(json.dumps(replies[0]))
    changed["choices"][1]["digests"][0] = "00" * 16
    path.write_text(json.dumps(changed))
    assert run(("verify", str(path), *model)) == 1
    assert "NO MATCH" in capsys.readouterr().out
    path.write_text("")
    assert run(("verify", str(path), *model)) == 1
    path.write_text("{")
    with pytest.raises(InputError):
        read_replies(Path(path))
