"""A draft model changes only the number of steps: tokens, numbers and finish reasons stay the same."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driven import KINDS, Driven, told
from logprobe import LLM, EngineConfig, SamplingParams
from logprobe.engine.backends.thread import SerialLoop
from logprobe.engine.draft_model import PROBE_STEPS
from logprobe.engine.overlap import OverlappedLoop
from logprobe.engine.plan.drafts import least_chance
from logprobe.errors import ParameterError
from logprobe.testing import FakeForward
from logprobe.transport.messages import Abort, Pause, Resume

if TYPE_CHECKING:
    from pathlib import Path

ASKED: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 40, "logprobs": 2},
    {"temperature": 0.9, "seed": 3, "max_tokens": 40, "logprobs": 1},
    {"n": 3, "seed": 4, "max_tokens": 30, "logprobs": 1, "prompt_logprobs": 1},
    {"top_p": 0.8, "top_k": 20, "min_p": 0.01, "seed": 6, "max_tokens": 30, "logprobs": 2,
     "logprobs_mode": "both", "kept_ids": True},
    {"logit_bias": {100: 2.0}, "bad_words": ["be"], "min_tokens": 9, "seed": 1, "max_tokens": 30},
    {"temperature": 0, "max_tokens": 40, "stop": ["a"], "min_tokens": 5},
    {"temperature": 0, "max_tokens": 30, "return_hidden_states": "last"},
]  # fmt: skip


class Near(FakeForward):
    """A fake model whose logits are those of another one with some noise."""

    def __init__(self, noise: float, **sizes: Any) -> None:
        super().__init__(**sizes)
        self._noise = noise

    def _logits_of(self, state: int) -> Any:
        other = FakeForward(self.vocab_size, seed=99)._logits_of(state)
        return super()._logits_of(state) + self._noise * other


def drafting(noise: float = 0.3, draft_slots: int = 600, **more: Any) -> Driven:
    draft = Near(noise, num_slots=draft_slots)
    return Driven(draft=draft, speculate="model:fake draft", **{"num_slots": 400} | more)


@pytest.mark.parametrize("params", ASKED)
@pytest.mark.parametrize("loop", [SerialLoop, OverlappedLoop])
@pytest.mark.parametrize("noise", [0.0, 0.5, 9.0])
def test_a_request_alone_ends_the_same(params: dict[str, Any], loop: Any, noise: float) -> None:
    got, want = drafting(noise, loop=loop), Driven(loop=loop)
    for driven in (got, want):
        driven.submit("r", [5, 97, 98, 101], **params)
    assert told(got.finish()["r"]) == told(want.finish()["r"])
    stats = got.engine.stats()
    assert stats.drafted_tokens == sum(stats.drafted_by_position)
    assert stats.accepted_tokens == sum(stats.accepted_by_position)
    if noise == 0 and "logit_bias" not in params and "stop" not in params:
        assert got.num_steps < 0.9 * want.num_steps


def test_a_model_that_drafts_for_itself_is_always_right_greedy_or_sampled() -> None:
    for temperature in (0.0, 1.0):
        driven = drafting(0.0)
        driven.submit("r", [5, 97, 98], temperature=temperature, seed=1, max_tokens=60)
        [completion] = driven.finish()["r"].outputs
        drafts: Any = completion.drafts
        # Drafts beyond the last token are not counted as accepted.
        assert drafts.num_drafted > 30
        assert drafts.num_accepted == drafts.num_drafted
        assert drafts.drafted_by_position == drafts.accepted_by_position
        assert drafts.drafted_by_position[0] >= drafts.drafted_by_position[-1]


def test_a_model_that_is_never_right_is_asked_less_and_less() -> None:
    driven = drafting(100.0)
    driven.submit("r", [5, 97, 98], temperature=0, max_tokens=300)
    [completion] = driven.finish()["r"].outputs
    assert 0 < completion.drafts.num_drafted < 150
    assert completion.drafts.num_accepted < 10


def test_a_draft_model_rests_while_it_is_wrong_and_returns_when_it_is_right() -> None:
    driven = drafting(100.0)
    draft: Any = driven.engine.drafter._forward  # type: ignore[union-attr]
    own_run, num_runs = draft.run, 0

    def run(batch: Any) -> None:
        nonlocal num_runs
        num_runs += 1
        own_run(batch)

    draft.run = run
    driven.submit("r", [5, 97, 98], temperature=0, max_tokens=400)
    for _ in range(100):
        driven.step()
    num_runs = 0
    for _ in range(5 * PROBE_STEPS):
        driven.step()
    assert 1 <= num_runs <= 6
    draft._noise = 0.0
    before = driven.engine.stats().accepted_tokens
    driven.finish()
    assert driven.engine.stats().accepted_tokens > before + 50


def test_the_draft_model_gets_no_more_samples_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = drafting(max_num_seqs=5)
    asked: list[int] = []
    own = driven.engine.drafter.draft  # type: ignore[union-attr]

    def draft(wanted: Any, num_rows: int) -> Any:
        asked.append(sum(wanted.values()) - (5 - num_rows))
        return own(wanted, num_rows)

    monkeypatch.setattr(driven.engine.drafter, "draft", draft)
    for place in range(4):
        driven.submit(f"r{place}", [5, 97 + place, 98], temperature=0, max_tokens=30)
    driven.finish()
    assert asked
    assert max(asked) <= 0


def test_a_draft_that_has_been_made_is_verified_where_making_it_would_not_pay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("logprobe.engine.draft_model.DraftModel.least_chance", lambda *_: 0.9)
    driven = drafting(0.0)
    drafter: Any = driven.engine.drafter
    drafter._rates = [0.5] * len(drafter._rates)  # above 1/3, from which one more row saves time
    driven.submit("r", [5, 97, 98], temperature=1, seed=1, max_tokens=20)
    driven.step()
    driven.step()
    stats = driven.engine.stats()
    assert stats.drafted_by_position == stats.accepted_by_position == [1]


ARRIVALS = st.tuples(
    st.integers(0, 12),
    st.sampled_from([params for params in [*ASKED, *KINDS] if "entropy" not in params]),
    st.lists(st.integers(97, 110), min_size=1, max_size=20),
)
ORDERS = st.tuples(st.integers(1, 20), st.sampled_from([Pause, Resume]), st.integers(0, 6))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=5),
    orders=st.lists(ORDERS, max_size=5),
    sizes=st.fixed_dictionaries(
        {
            "num_slots": st.integers(110, 250),
            "max_num_batched_tokens": st.integers(4, 40),
            "max_num_seqs": st.integers(1, 20),
        }
    ),
    draft_slots=st.integers(20, 300),
    loop=st.sampled_from([SerialLoop, OverlappedLoop]),
)
def test_many_requests_end_the_same(
    arrivals: list[Any], orders: list[Any], sizes: dict[str, int], draft_slots: int, loop: Any
) -> None:
    got = drafting(draft_slots=draft_slots, loop=loop, **sizes).play(arrivals, orders)
    assert got == Driven(loop=loop, **sizes).play(arrivals, orders)


def test_slots_of_the_draft_model_are_freed() -> None:
    driven = drafting()
    driven.submit("r", [5, 97, 98], temperature=0, max_tokens=200)
    driven.submit("s", [5, 97, 98, 99], temperature=0, max_tokens=20)
    for _ in range(8):
        driven.step()
    driven.handle(Abort("r"))
    driven.finish()
    drafter: Any = driven.engine.drafter
    assert drafter._pool.num_free == drafter._pool.num_slots


def test_a_draft_model_that_fails_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    draft = FakeForward(num_slots=600)
    driven = Driven(draft=draft, speculate="model:fake draft")

    def fail(_: Any) -> None:
        raise RuntimeError("no")

    draft.run = fail  # type: ignore[method-assign]
    driven.submit("r", [5, 97, 98], temperature=0, max_tokens=20)
    want = Driven()
    want.submit("r", [5, 97, 98], temperature=0, max_tokens=20)
    assert told(driven.finish()["r"]) == told(want.finish()["r"])
    assert [record.levelname for record in caplog.records] == ["ERROR"]


# -- real decoders -------------------------------------------------------------------------------------------

TEXT = "the cat and the dog"
SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 21}


@pytest.mark.parametrize("more", [{}, {"process": True}, {"async_scheduling": True}])
def test_a_second_model_drafts_for_the_tiny_llama(
    tiny_model_folder: Path, tiny_llm: LLM, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The draft model is as large as the model itself, so that no draft saves time.
    monkeypatch.setattr("logprobe.engine.draft_model.DraftModel.least_chance", lambda *_: 0.0)
    params = SamplingParams(max_tokens=24, seed=3, ignore_eos=True, logprobs=2, n=2)
    with LLM(str(tiny_model_folder), speculate=f"model:{tiny_model_folder}", **SMALL, **more) as llm:
        got = llm.generate([TEXT, "a dog"], params)
        stats, facts = llm.engine.stats(), llm.engine.capabilities()
    want = tiny_llm.generate([TEXT, "a dog"], params)
    assert [told(output) for output in got] == [told(output) for output in want]
    if "process" not in more:  # the patch does not reach a child process
        assert stats.accepted_tokens > 20
    assert sum(stats.accepted_by_position) == stats.accepted_tokens
    assert facts.speculate
    assert facts.draft_model == str(tiny_model_folder)


def test_a_draft_model_with_other_tokens_is_refused(
    tiny_model_folder: Path, tiny_window_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model_folder, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["cat"], vocabulary["dog"] = vocabulary["dog"], vocabulary["cat"]
    file.write_text(json.dumps(tokenizer))
    for draft in (tiny_window_folder, tmp_path / "other"):
        with pytest.raises(ParameterError, match="tokenizer") as caught:
            LLM(str(tiny_model_folder), speculate=f"model:{draft}", **SMALL)
        assert caught.value.parameter == "speculate"


def test_a_draft_must_be_the_likelier_the_more_it_costs(tiny_model_folder: Path, tiny_llm: LLM) -> None:
    free = drafting().engine.drafter
    assert free is not None
    for num_rows in (1, 4, 30):
        assert free.least_chance(num_rows) == pytest.approx(least_chance(num_rows), abs=0.02)
    with LLM(str(tiny_model_folder), speculate=f"model:{tiny_model_folder}", **SMALL) as llm:
        drafter: Any = llm.engine.core.engine.drafter  # type: ignore[attr-defined]
        assert drafter.least_chance(1) >= 1
        params = SamplingParams(max_tokens=8, seed=3, ignore_eos=True)
        assert llm.generate(TEXT, params)[0].outputs[0].token_ids == (
            tiny_llm.generate(TEXT, params)[0].outputs[0].token_ids
        )


def test_metrics_count_drafts_by_their_place(
    tiny_model_folder: Path, new_serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx

    from logprobe.server import ServerSettings

    monkeypatch.setattr("logprobe.engine.draft_model.DraftModel.least_chance", lambda *_: 0.0)
    with (
        LLM(str(tiny_model_folder), speculate=f"model:{tiny_model_folder}", **SMALL) as llm,
        new_serving(llm, ServerSettings()) as (url, _),
    ):
        body = {"prompt": TEXT, "max_tokens": 20, "seed": 1, "ignore_eos": True}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
        lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
        counts = llm.engine.stats().accepted_by_position
        assert httpx.get(f"{url}/v1/capabilities", timeout=60).json()["draft_model"]
    found = [line for line in lines if line.startswith("logprobe_accepted_tokens_by_position_total{")]
    assert [float(line.split()[-1]) for line in found] == counts
    assert counts[0] > 0


@pytest.mark.parametrize("value", ["smollm2", "model:", "model: ", 1, None, "yes"])
def test_another_value_is_refused(value: Any) -> None:
    with pytest.raises(ParameterError, match="lookup") as caught:
        EngineConfig(speculate=value)
    assert caught.value.parameter == "speculate"


def test_names_of_what_drafts() -> None:
    assert [EngineConfig(speculate=one).scheduler_config.speculate for one in ("lookup", "off")] == [
        True,
        False,
    ]
    for name in ("model:a/b", "model:  a/b "):
        assert EngineConfig(speculate=name).scheduler_config.draft_model == "a/b"
    assert EngineConfig(speculate=True).scheduler_config.draft_model is None
