"""How long one caller's work delays another's next token, in steps and in work per step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from logprobe.engine.plan.shares import LARGE_PART

if TYPE_CHECKING:
    from collections.abc import Callable

GREEDY = {"temperature": 0.0, "ignore_eos": True}
STEP = 16  # tokens
PART = STEP // LARGE_PART
MAX_STEPS = 3


@pytest.fixture
def watched(new_engine: Callable[..., Any]) -> Callable[..., Any]:
    """An engine with short steps and eight batch rows that records tokens and prompt rows of each step."""

    def make(num_slots: int = 2000, **settings: Any) -> Any:
        engine = new_engine(num_slots, **{"max_num_batched_tokens": STEP, "max_num_seqs": 8} | settings)
        engine.num_tokens, engine.num_rows = [], []
        engine.forward.before_run = lambda batch: engine.num_tokens.append(len(batch.token_ids))
        score = engine.engine.scorer.score

        def noted(spans: Any) -> Any:
            engine.num_rows.append(sum(map(len, spans)))
            return score(spans)

        engine.engine.scorer.score = noted
        return engine

    return make


def prompt(length: int, first: int = 2) -> list[int]:
    return [(first + place * 7) % 280 + 2 for place in range(length)]


# One client's requests, while another client waits for its next token.
HEAVY: dict[str, Callable[[Any], None]] = {
    "a long prompt": lambda engine: engine.submit("long", prompt(120), max_tokens=1, call="heavy", **GREEDY),
    "a long echo": lambda engine: engine.submit(
        "echo", prompt(120), max_tokens=0, prompt_logprobs=20, call="heavy"
    ),
    "128 samples": lambda engine: engine.submit(
        "many", prompt(20), n=128, max_tokens=30, ignore_eos=True, call="heavy"
    ),
    "128 samples of a long prompt": lambda engine: engine.submit(
        "many", prompt(90), n=128, max_tokens=30, ignore_eos=True, call="heavy"
    ),
    "512 prompts of one token": lambda engine: [
        engine.submit(f"one{number}", [number % 240 + 2], max_tokens=20, call="heavy", **GREEDY)
        for number in range(512)
    ],
    "long prompts": lambda engine: [
        engine.submit(f"p{number}", prompt(100, number + 2), max_tokens=9, call="heavy", **GREEDY)
        for number in range(20)
    ],
}


@pytest.mark.parametrize("name", HEAVY)
def test_a_neighbour_gets_a_token_in_every_step(watched: Callable[..., Any], name: str) -> None:
    engine = watched()
    neighbour = engine.submit("neighbour", prompt(6, 9), max_tokens=25, call="neighbour", **GREEDY)
    engine.step()
    HEAVY[name](engine)
    for number in range(2, 25):
        engine.step()
        assert len(neighbour.outputs[0].token_ids) == number
    engine.run()
    engine.assert_idle()


@pytest.mark.parametrize("name", HEAVY)
def test_a_neighbour_that_comes_later_has_its_first_token_soon(
    watched: Callable[..., Any], name: str
) -> None:
    engine = watched()
    HEAVY[name](engine)
    engine.step()
    neighbour = engine.submit("neighbour", prompt(10, 9), max_tokens=9, call="neighbour", **GREEDY)
    for _ in range(MAX_STEPS):
        engine.step()
    assert neighbour.outputs[0].token_ids
    for _ in range(8):
        engine.step()
    assert neighbour.is_finished
    engine.run()
    engine.assert_idle()


@pytest.mark.parametrize("name", HEAVY)
def test_a_neighbours_numbers_are_those_it_gets_alone(
    watched: Callable[..., Any], assert_same: Callable[..., None], name: str
) -> None:
    asked = {"max_tokens": 9, "logprobs": 3, "prompt_logprobs": 2, "call": "neighbour", **GREEDY}
    engine = watched(600)
    HEAVY[name](engine)
    engine.step()
    mine = engine.submit("neighbour", prompt(10, 9), **asked)
    engine.run()
    engine.assert_idle()
    alone = watched(600)
    want = alone.submit("alone", prompt(10, 9), **asked)
    alone.run()
    assert_same(mine, want)


@pytest.mark.parametrize("name", ["a long prompt", "a long echo", "long prompts"])
def test_a_step_beside_a_neighbour_runs_a_sixteenth_of_a_large_call(
    watched: Callable[..., Any], name: str
) -> None:
    engine = watched()
    engine.submit("neighbour", prompt(6, 9), max_tokens=20, call="neighbour", **GREEDY)
    engine.step()
    HEAVY[name](engine)
    engine.num_tokens.clear()
    engine.num_rows.clear()
    for _ in range(15):
        engine.step()
    assert max(engine.num_tokens) <= PART + 8  # plus one token of each generating request
    assert max(engine.num_rows, default=0) <= PART
    engine.run()


@pytest.mark.parametrize("name", HEAVY)
def test_a_call_alone_takes_whole_steps(watched: Callable[..., Any], name: str) -> None:
    shared, plain = watched(), watched()
    HEAVY[name](shared)
    shared.run()
    plain.engine.scheduler.shares.add = lambda _: None  # no fair sharing between callers
    plain.engine.scheduler.shares.end = lambda _: None
    HEAVY[name](plain)
    plain.run()
    assert shared.num_tokens == plain.num_tokens
    assert shared.num_rows == plain.num_rows


def test_calls_of_one_kind_are_served_in_the_order_of_their_arrival(watched: Callable[..., Any]) -> None:
    engine = watched(max_num_seqs=2)
    names = [f"r{index}" for index in range(9)]
    for index, name in enumerate(names):
        engine.submit(name, prompt(10, index + 2), max_tokens=4, call=name, **GREEDY)
    ended: list[str] = []
    while engine.engine.has_work:
        engine.step()
        ended += [name for name in names if engine.num_ends[name] and name not in ended]
    assert ended == names
    assert engine.scheduler.num_preempted == 0


def test_a_large_call_goes_on_beside_a_flood_of_small_ones(watched: Callable[..., Any]) -> None:
    engine = watched()
    large = engine.submit("large", prompt(120), max_tokens=1, call="large", **GREEDY)
    for number in range(120 // PART + 3):
        name = f"small{number}"
        engine.submit(name, prompt(14, number % 200 + 3), max_tokens=1, call=name, **GREEDY)
        engine.step()
    assert large.is_finished
    engine.run()
    engine.assert_idle()


def test_two_calls_that_fill_the_pool_do_not_take_from_each_other_in_turn(
    watched: Callable[..., Any],
) -> None:
    engine = watched(300)
    for call in "ab":
        for number in range(4):
            ids = prompt(60, 2 + number + 50 * (call == "b"))
            engine.submit(f"{call}{number}", ids, max_tokens=20, call=call, **GREEDY)
    engine.run()
    assert engine.scheduler.num_preempted <= 16
    engine.assert_idle()


def test_a_neighbour_gets_slots_where_one_call_holds_them_all(watched: Callable[..., Any]) -> None:
    engine = watched(400)
    for number in range(8):
        engine.submit(f"p{number}", prompt(49, number + 2), max_tokens=100, call="heavy", **GREEDY)
    while engine.scheduler.num_available > 8:
        engine.step()
    neighbour = engine.submit("neighbour", prompt(14, 99), max_tokens=3, call="neighbour", **GREEDY)
    for _ in range(MAX_STEPS + 2):
        engine.step()
    assert neighbour.is_finished
    engine.run()
    engine.assert_idle()


def flood(engine: Any, kind: str, num_calls: int = 300) -> None:
    """Submit many requests of one caller, each small enough for one step."""
    asked = {"long texts": {"max_tokens": 60}, "prompts": {"max_tokens": 1}}[kind] | GREEDY
    length = {"long texts": 2, "prompts": STEP - 1}[kind]
    for number in range(num_calls):
        ids = [number % 250 + 2, number // 250 + 2, *prompt(length)][:STEP]
        engine.submit(f"f{number}", ids, call=f"f{number}", caller="flood", **asked)


@pytest.mark.parametrize("kind", ["long texts", "prompts"])
def test_a_caller_is_served_soon_beside_anothers_many_calls(watched: Callable[..., Any], kind: str) -> None:
    engine = watched()
    flood(engine, kind)
    engine.step()
    asked = {"max_tokens": 9, "caller": "neighbour", "call": "neighbour", **GREEDY}
    neighbour = engine.submit("neighbour", prompt(10, 9), **asked)
    for _ in range(MAX_STEPS):
        engine.step()
    assert neighbour.outputs[0].token_ids
    for _ in range(8):
        engine.step()
    assert neighbour.is_finished


def test_a_callers_numbers_are_those_it_gets_alone(
    watched: Callable[..., Any], assert_same: Callable[..., None]
) -> None:
    asked = {"max_tokens": 9, "logprobs": 3, "prompt_logprobs": 2, "call": "mine", "caller": "me", **GREEDY}
    engine = watched(600)
    flood(engine, "long texts", 40)
    engine.step()
    mine = engine.submit("mine", prompt(10, 9), **asked)
    engine.run()
    engine.assert_idle()
    alone = watched(600)
    want = alone.submit("alone", prompt(10, 9), **asked)
    alone.run()
    assert_same(mine, want)


def test_calls_of_one_caller_share_what_it_has_beside_another_caller(watched: Callable[..., Any]) -> None:
    engine = watched()
    flood(engine, "long texts", 20)
    engine.submit("many", prompt(6), n=64, max_tokens=60, ignore_eos=True, call="many", caller="me")
    for _ in range(MAX_STEPS):
        engine.step()
    short = engine.submit("short", prompt(6, 9), max_tokens=2, call="short", caller="me", **GREEDY)
    for _ in range(MAX_STEPS + 1):
        engine.step()
    assert short.is_finished


def test_a_caller_that_comes_gets_slots_where_anothers_calls_hold_them_all(
    watched: Callable[..., Any],
) -> None:
    engine = watched(400)
    for number in range(8):
        asked = {"max_tokens": 100, "call": f"p{number}", "caller": "flood", **GREEDY}
        engine.submit(f"p{number}", prompt(14, number + 2), **asked)
    while engine.scheduler.num_available > 8:
        engine.step()
    asked = {"max_tokens": 3, "call": "neighbour", "caller": "neighbour", **GREEDY}
    neighbour = engine.submit("neighbour", prompt(14, 99), **asked)
    for _ in range(MAX_STEPS + 2):
        engine.step()
    assert neighbour.is_finished
    engine.run()
    engine.assert_idle()


def test_two_callers_do_not_take_from_each_other_in_turn(watched: Callable[..., Any]) -> None:
    engine = watched(300)
    for caller in "ab":
        for number in range(6):
            name = f"{caller}{number}"
            ids = prompt(14, 2 + number + 50 * (caller == "b"))
            engine.submit(name, ids, max_tokens=60, call=name, caller=caller, **GREEDY)
    engine.run()
    assert engine.scheduler.num_preempted <= 16
    engine.assert_idle()
