"""The web page in a real Chromium with a real server: it shows the API's numbers and calls no other host."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from server_process import serving_process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from server_process import Attacked

TEXT = "the cat and the dog"
KEY = "a-key-of-the-test"
SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}, "is_sure": {"type": "boolean"}},
    "required": ["mood", "is_sure"],
    "additionalProperties": False,
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
MINUS = "\N{MINUS SIGN}"  # as written by the page


@pytest.fixture(scope="module")
def served(tiny_model_folder: Path) -> Iterator[Attacked]:
    """The tiny model under a long name, without a key."""
    with serving_process(
        tiny_model_folder, "--served-model-name", "a-model/of-a-name-" + "longer" * 8
    ) as server:
        yield server


@pytest.fixture(scope="module")
def locked(tiny_model_folder: Path) -> Iterator[Attacked]:
    """The tiny model, protected by a key."""
    with serving_process(tiny_model_folder, "--api-key", KEY) as server:
        yield server


@pytest.fixture(scope="module")
def thinking(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """The tiny model with a chat template that supports reasoning."""
    folder = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(tiny_model_folder, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with serving_process(folder) as server:
        yield server


class Seen:
    """A tab with the page that records its requests and errors."""

    def __init__(self, tab: Any, url: str) -> None:
        self.tab = tab
        self.url = url
        self.requests: list[str] = []
        self.complaints: list[str] = []
        tab.on("request", lambda request: self.requests.append(request.url))
        tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        tab.on("console", self._note)
        tab.goto(url)

    def _note(self, message: Any) -> None:
        if message.type in {"error", "warning"}:
            self.complaints.append(message.text)

    def ask(self, text: str, button: str = "#go", **fields: str) -> None:
        """Fill in the form, press the button, and wait for the end."""
        self.tab.wait_for_selector("body[data-ready]")
        self.tab.fill("#text-a", text)
        for name, value in fields.items():
            self.tab.fill(f"#{name.replace('_', '-')}", value)
        self.tab.click(button)
        self.wait()

    def wait(self) -> None:
        """Wait until nothing is in progress."""
        self.tab.wait_for_selector("#stop", state="hidden")

    def export(self, button: str, folder: Path) -> Path:
        with self.tab.expect_download() as download:
            self.tab.click(button)
        path = folder / download.value.suggested_filename
        download.value.save_as(path)
        return path

    def tokens(self, panel: int = 0) -> list[str]:
        return self.tab.locator(".panel").nth(panel).locator(".token").all_text_contents()

    def facts(self) -> dict[str, str]:
        """Return the details of the selected token."""
        detail = self.tab.locator("#detail")
        names, values = (detail.locator(tag).all_text_contents() for tag in ("dt", "dd"))
        return dict(zip(names, values, strict=True))


@pytest.fixture
def seen(new_tab: Any, served: Attacked) -> Seen:
    return Seen(new_tab(viewport={"width": 1200, "height": 900}), f"http://127.0.0.1:{served.port}/")


@pytest.fixture(scope="module")
def rows(served: Attacked) -> list[dict[str, Any]]:
    """Return the API's rows of the text; the first token has no row."""
    body = {"prompt": TEXT, "max_tokens": 0, "prompt_logprobs": 10, "prompt_rows": True, "entropy": True}
    reply = json.loads(served.post("/v1/completions", **body).data)
    choice = reply["choices"][0]
    pairs = zip(choice["prompt_rows"], choice["prompt_entropy"], strict=True)
    return [row and row | {"entropy": entropy} for row, entropy in pairs]


def test_a_scored_text_is_shaded_by_the_numbers_of_the_api(seen: Seen, rows: list[Any]) -> None:
    seen.ask(TEXT, "#score")
    classes = [token.get_attribute("class") for token in seen.tab.locator(".token").all()]
    assert seen.tokens()[1:] == [row["token"] for row in rows[1:]]
    shades = [re.search(r"\bs(\d)\b", name) for name in classes]
    assert shades[0] is None
    assert [int(shade[1]) for shade in shades[1:] if shade] == [
        min(8, int(-row["logprob"])) for row in rows[1:]
    ]
    total = sum(row["logprob"] for row in rows[1:])
    totals = seen.tab.inner_text(".totals").replace(MINUS, "-")
    assert f"{total:.3f} nats" in totals
    assert f"{math.exp(-total / (len(rows) - 1)):.3f}" in totals
    assert seen.complaints == []


def test_a_token_in_hand_tells_its_numbers_by_mouse_and_by_keyboard(seen: Seen, rows: list[Any]) -> None:
    seen.ask(TEXT, "#score")
    seen.tab.locator(".token").nth(2).hover()
    for place in (2, 3):
        facts, row = seen.facts(), rows[place]
        assert facts["logprob"].replace(MINUS, "-").startswith(f"{row['logprob']:.4f} nats")
        assert facts["rank"] == str(row["rank"])
        assert facts["entropy"] == f"{row['entropy']:.3f} nats"
        assert facts["bytes"] == " ".join(f"{byte:02x}" for byte in row["bytes"])
        assert facts["token id"] == str(row["token_id"])
        bars = seen.tab.locator(".bars em").all_text_contents()
        assert len(bars) == 10
        assert float(bars[0].removesuffix(" %")) == pytest.approx(
            100 * math.exp(row["top_logprobs"][0]["logprob"]), abs=0.006
        )
        seen.tab.locator(".token").nth(place).focus()
        seen.tab.keyboard.press("ArrowRight")
    seen.tab.keyboard.press("Home")
    assert "first token" in seen.facts()["logprob"]


def test_a_continuation_streams_and_ends_with_ranks_and_both_stages(seen: Seen, tmp_path: Path) -> None:
    seen.ask(TEXT, max_tokens="12", temperature="0.5", seed="3")
    found = json.loads(seen.export("#json", tmp_path).read_text())
    tokens = found["texts"][0]["tokens"]
    new = [token for token in tokens if token["is_generated"]]
    assert len(new) == 12
    assert all(token["rank"] >= 1 and token["bytes"] is not None for token in new)
    assert any(abs(token["logprob"] - token["processed_logprob"]) > 1e-3 for token in new)
    # The other mode shows other surprisals, for the generated tokens only.
    labels = [token.get_attribute("aria-label") for token in seen.tab.locator(".token").all()]
    seen.tab.select_option("#stage", "processed")
    others = [token.get_attribute("aria-label") for token in seen.tab.locator(".token").all()]
    num_prompt = len(tokens) - len(new)
    assert labels[:num_prompt] == others[:num_prompt]
    assert labels[num_prompt:] != others[num_prompt:]
    expected = f"{-new[0]['processed_logprob']:.2f}".replace("-", MINUS)
    assert expected in others[num_prompt]


def test_a_generated_token_has_both_stages_side_by_side(seen: Seen) -> None:
    seen.ask(TEXT, max_tokens="4", temperature="0.5", seed="3")
    seen.tab.locator(".token").last.focus()
    stages = seen.tab.locator(".stages section")
    assert stages.locator("h3").all_text_contents() == ["Raw", "Processed"]
    raw, processed = (stages.nth(place).bounding_box() for place in (0, 1))
    assert raw["y"] == processed["y"]
    assert raw["x"] + raw["width"] <= processed["x"]
    first_bars = [stages.nth(place).locator(".bars em").first.text_content() for place in (0, 1)]
    assert first_bars[0] != first_bars[1]  # differ at half the temperature
    assert {"rank", "entropy", "bytes", "processed"} <= set(seen.facts())


def test_an_alternative_is_gone_on_from(seen: Seen) -> None:
    seen.ask(TEXT, "#score", max_tokens="4")
    before = seen.tokens()
    seen.tab.locator(".token").nth(3).focus()
    seen.tab.keyboard.press("Enter")
    chosen = seen.tab.evaluate("document.activeElement.querySelector('b').textContent")
    seen.tab.keyboard.press("Enter")
    seen.tab.wait_for_selector(".branches li >> nth=1")
    seen.wait()
    after = seen.tokens()
    assert after[:3] == before[:3]
    assert json.dumps(after[3])[1:-1].replace(" ", "␣") == chosen
    assert len(after) == 8
    seen.tab.click(".branches button >> nth=0")
    assert seen.tokens() == before
    assert seen.complaints == []


def test_two_texts_stand_side_by_side(seen: Seen) -> None:
    seen.tab.wait_for_selector("body[data-ready]")
    seen.tab.check("#compare")
    seen.tab.fill("#text-b", "the dog and the cat")
    seen.ask(TEXT, "#score")
    assert ["".join(seen.tokens(panel)[1:]) for panel in (0, 1)] == [
        "the cat and the dog",
        "the dog and the cat",
    ]
    left, right = (seen.tab.locator(".panel").nth(panel).bounding_box() for panel in (0, 1))
    assert left["y"] == right["y"]
    assert seen.tab.locator(".totals").count() == 2


def test_the_csv_file_holds_the_numbers(seen: Seen, rows: list[Any], tmp_path: Path) -> None:
    seen.ask(TEXT, "#score")
    with seen.export("#csv", tmp_path).open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(rows)
    for line, row in zip(lines[1:], rows[1:], strict=True):
        assert float(line["logprob"]) == row["logprob"]
        assert json.loads(line["token"]) == row["token"]
        assert json.loads(line["bytes"]) == row["bytes"]
        assert (int(line["token_id"]), int(line["rank"])) == (row["token_id"], row["rank"])


def test_what_the_server_refuses_is_said_in_words(seen: Seen) -> None:
    seen.ask("cat " * 400, "#score")
    alert = seen.tab.inner_text("#error")
    assert "prompt" in alert
    assert "128" in alert  # the context length
    seen.ask(TEXT, "#score")
    assert seen.tab.locator("#error").is_hidden()


def test_a_key_is_asked_for_and_used(new_tab: Any, locked: Attacked) -> None:
    seen = Seen(new_tab(), f"http://127.0.0.1:{locked.port}/")
    seen.tab.wait_for_selector("#error:not([hidden])")
    assert "API key" in seen.tab.inner_text("#error")
    seen.tab.fill("#key", "a wrong one")
    seen.tab.click("#key-form button")
    seen.tab.wait_for_selector("#error:not([hidden])")
    assert seen.tab.locator("body[data-ready]").count() == 0
    seen.tab.fill("#key", KEY)
    seen.tab.click("#key-form button")
    seen.ask(TEXT, "#score")
    assert seen.tab.locator("#error").is_hidden()
    assert len(seen.tokens()) > 2


def test_nothing_leaves_the_origin(seen: Seen) -> None:
    seen.ask(TEXT, max_tokens="3")
    assert seen.requests
    assert all(url.startswith((seen.url, "data:")) for url in seen.requests)
    assert seen.complaints == []


@pytest.mark.parametrize("width", [380, 768, 1280])
def test_no_width_scrolls_sideways(new_tab: Any, served: Attacked, width: int) -> None:
    seen = Seen(new_tab(viewport={"width": width, "height": 800}), f"http://127.0.0.1:{served.port}/")
    seen.ask(TEXT, max_tokens="20")
    seen.tab.locator(".token").nth(4).focus()
    assert seen.tab.evaluate("document.documentElement.scrollWidth") == width


def test_a_json_answer_shows_each_value_with_its_own_probability(seen: Seen, tmp_path: Path) -> None:
    seen.tab.wait_for_selector("body[data-ready]")
    seen.tab.click("#form summary")
    seen.tab.fill("#schema", json.dumps(SCHEMA))
    seen.ask(TEXT, max_tokens="60", seed="3")
    found = json.loads(seen.export("#json", tmp_path).read_text())["texts"][0]
    values = {field["pointer"]: field for field in found["fields"] if "value" in field}
    assert list(values) == ["/mood", "/is_sure"]
    rows = seen.tab.locator(".fields > div")
    for place, (pointer, field) in enumerate(values.items()):
        name, value, share = (rows.nth(place).locator(tag).first for tag in ("code", "button b", "button em"))
        assert name.text_content() == pointer
        assert json.loads(value.text_content()) == field["value"]
        assert share.text_content() == as_percent(field["logprob"])
        sections = rows.nth(place).locator(".shares section")
        assert sections.locator("h3").all_text_contents() == ["Raw share", "Share under the schema"]
        for section, key in enumerate(("share", "grammar_share")):
            bars = sections.nth(section).locator(".bars em").all_text_contents()
            assert bars == [f"{100 * member[key]:.2f} %" for member in field["members"]]
        assert sum(member["share"] for member in field["members"]) == pytest.approx(1, abs=1e-6)
        # All tokens of a value have the shade of the whole value.
        shade = f"s{min(8, int(-field['logprob']))}"
        tokens = [seen.tab.locator(".token").nth(at) for at in range(*field["tokens"])]
        assert all(shade in token.get_attribute("class").split() for token in tokens)
    rows.nth(0).locator("button").click()
    assert seen.tab.evaluate("document.activeElement.className").startswith("token")
    seen.tab.select_option("#stage", "processed")
    share = rows.nth(0).locator("button em").first.text_content()
    assert share == as_percent(values["/mood"]["processed_logprob"])
    assert seen.complaints == []


def test_a_schema_that_is_no_json_is_said_in_words(seen: Seen) -> None:
    seen.tab.wait_for_selector("body[data-ready]")
    seen.tab.click("#form summary")
    seen.tab.fill("#schema", "{mood:")
    seen.ask(TEXT)
    assert "JSON schema" in seen.tab.inner_text("#error")


def test_reasoning_is_folded_with_its_own_surprisal(new_tab: Any, thinking: Attacked, tmp_path: Path) -> None:
    seen = Seen(new_tab(), f"http://127.0.0.1:{thinking.port}/")

    def forced(route: Any) -> None:
        # A tiny model never ends its reasoning by itself.
        form = {"type": "choice", "choice": ["<think>the cat</think>the dog"]}
        route.continue_(post_data=json.dumps(route.request.post_data_json | {"response_format": form}))

    seen.tab.route("**/v1/chat/completions", forced)
    seen.tab.wait_for_selector("body[data-ready]")
    seen.tab.check("#chat")
    seen.ask("cat", max_tokens="60", seed="1")
    tokens = json.loads(seen.export("#json", tmp_path).read_text())["texts"][0]["tokens"]
    folded = seen.tab.locator(".reasoning")
    assert not folded.evaluate("element => element.open")
    thought = folded.locator(".token").all_text_contents()
    assert "".join(thought) == "the cat"
    assert "".join(seen.tokens()) == "the catthe dog"
    own, rest = tokens[: len(thought)], tokens[len(thought) :]
    total = -sum(token["logprob"] for token in own)
    assert f"{len(own)} tokens, {total:.3f} nats" in folded.locator("summary").text_content()
    said = sum(token["logprob"] for token in rest)
    assert f"{said:.3f} nats".replace("-", MINUS) in seen.tab.inner_text(".totals")
    seen.tab.locator(".token").last.hover()
    assert {"logprob", "surprisal", "processed"} <= set(seen.facts())
    assert seen.complaints == []


def test_a_conversation_goes_on_and_begins_anew(new_tab: Any, served: Attacked) -> None:
    seen = Seen(new_tab(), f"http://127.0.0.1:{served.port}/")
    bodies: list[Any] = []
    seen.tab.on(
        "request", lambda request: bodies.append(request.post_data_json) if request.post_data else None
    )
    seen.tab.wait_for_selector("body[data-ready]")
    seen.tab.check("#chat")
    seen.ask("the cat", max_tokens="5", seed="1")
    seen.ask("a dog", max_tokens="5")
    whole = json.loads(served.post("/v1/chat/completions", **bodies[0] | {"stream": False}).data)
    reply = whole["choices"][0]["message"]["content"]
    assert reply
    asked = [body["messages"] for body in bodies if "messages" in body]
    assert asked == [
        [{"role": "user", "content": "the cat"}],
        [
            {"role": "user", "content": "the cat"},
            {"role": "assistant", "content": reply},
            {"role": "user", "content": "a dog"},
        ],
    ]
    assert seen.tab.locator(".talk span").all_text_contents() == ["the cat", reply, "a dog"]
    assert seen.tab.input_value("#text-a") == ""
    seen.tab.click("#reset")
    seen.ask("a dog", max_tokens="5")
    assert bodies[-1]["messages"] == [{"role": "user", "content": "a dog"}]
    assert seen.complaints == []


def test_a_link_repeats_a_result_once_a_button_is_pressed(new_tab: Any, served: Attacked) -> None:
    first = Seen(new_tab(), f"http://127.0.0.1:{served.port}/")
    first.tab.wait_for_selector("body[data-ready]")
    first.tab.check("#chat")
    first.ask("the cat", max_tokens="5", seed="")
    first.ask("a dog", max_tokens="6", temperature="0.9")
    talk, tokens = first.tab.locator(".talk span").all_text_contents(), first.tokens()
    first.tab.click("#link")
    first.tab.wait_for_function("location.hash.length > 1")
    second = Seen(new_tab(), first.tab.url)
    second.tab.wait_for_selector("body[data-ready]")
    assert "Generate" in second.tab.inner_text("#status")
    assert not [url for url in second.requests if "completions" in url]
    second.tab.click("#go")
    second.wait()
    assert second.tab.locator(".talk span").all_text_contents() == talk
    assert second.tokens() == tokens
    assert first.complaints == second.complaints == []


@pytest.mark.parametrize("end", ["#%7Bbroken", "#%22text%22", "#" + "a" * 1000])
def test_a_link_that_is_not_valid_is_said_in_words(new_tab: Any, served: Attacked, end: str) -> None:
    seen = Seen(new_tab(), f"http://127.0.0.1:{served.port}/{end}")
    seen.tab.wait_for_selector("body[data-ready]")
    assert "link is not valid" in seen.tab.inner_text("#error")


def as_percent(logprob: float) -> str:
    """Format a probability as the page does."""
    share = 100 * math.exp(logprob)
    return f"{share:.2f} %" if share >= 0.01 else f"{share:.1e} %".replace("e-0", "e-")


def test_texts_are_never_taken_for_html(seen: Seen) -> None:
    seen.ask("<img src=x onerror=alert(1)><b>cat</b>", "#score")
    assert "".join(seen.tokens()).endswith("<b>cat</b>")
    assert seen.tab.locator("#panels img").count() == 0
    assert seen.tab.locator("#panels b").count() == 0
