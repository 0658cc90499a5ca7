"""This measures drafted tokens, verified several in one step, against one token a step.

One model, one process, the same requests with and without `speculate`: code to be edited and texts to be
summed up with quotes, where much of the answer stands in the prompt, and stories, where next to nothing
repeats. The first words of an answer are given, so that a small model, too, does what it is asked. Tokens a
second once the prompts are computed, at 1 and at 4 requests at once; the share of drafts that were right.
"""

import time
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from harness import OURS, ROOT, Figure, Options, Target, alternate, parse_options, publish

from logprobe import LLM, SamplingParams
from logprobe.engine.request import RequestOutput

TEXT = ROOT / "benchmarks" / "texts" / "coriolanus.txt"
PLAIN = "speculate off"
BATCHES = (1, 4)
COPYING = [Target(against=PLAIN, at_least=1.5)]
FREE = [Target(against=PLAIN, at_least=0.95)]
EDIT = (
    "Here is a Python file:\n\n```python\n{text}\n```\n\nRename `{old}` to `{new}` everywhere, change "
    "nothing else, and give the whole file again."
)
SUM_UP = (
    "{text}\n\nSum this text up. Quote each of its sentences that matters word for word, in quotation marks, "
    "and say in a few words of your own what follows from it."
)
EDITED = "Here is the whole file with `{new}`:\n\n```python\n{first}"
SUMMED_UP = 'These sentences matter:\n\n"{first}'
TELL = "Tell a story about {text}, with many people and places, and surprises at every turn."
EDITS = [
    ("engine/loras.py", "version", "digest"),
    ("records/values.py", "values", "items"),
    ("sampling/kept.py", "processed", "changed"),
    ("engine/forward/cpu/launch.py", "launch", "start"),
]
STORIES = ["a lighthouse in the desert", "a baker who hears rain", "a late train", "a map without north"]


@cache
def conversations(kind: str, num_chars: int) -> list[list[dict[str, str]]]:
    """Return chats about real texts, each with the first words of its answer."""
    if kind == "code editing":
        return [_edit(*one, num_chars) for one in EDITS]
    if kind == "summaries with quotes":
        text = TEXT.read_text(encoding="utf-8")
        parts = [text[start : start + 2000] for start in range(0, 2000 * max(BATCHES), 2000)]
        return [_sum_up(part[:num_chars]) for part in parts]
    return [_talk(TELL.format(text=text), "Once upon a time") for text in STORIES]


def _edit(name: str, old: str, new: str, num_chars: int) -> list[dict[str, str]]:
    text = (ROOT / "src" / "logprobe" / name).read_text(encoding="utf-8")[: min(num_chars, 1800)]
    question = EDIT.format(text=text, old=old, new=new)
    return _talk(question, EDITED.format(new=new, first=text.partition("\n")[0]))


def _sum_up(text: str) -> list[dict[str, str]]:
    first = text.partition(":\n")[2].split()[:3]
    return _talk(SUM_UP.format(text=text), SUMMED_UP.format(first=" ".join(first)))


def _talk(question: str, begun: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": begun}]


class Race:
    """One loaded model, with and without drafts in turn."""

    def __init__(self, options: Options) -> None:
        self.llm = LLM(options.model)
        self._num_tokens, self._num_chars = (8, 200) if options.is_smoke else (128, 2400)
        self._texts: dict[tuple[str, int, int], list[list[int]]] = {}
        self.accepted: dict[str, list[float]] = {}

    def measure(self, kind: str, batch: int, speculate: bool, number: int) -> float:
        """Tokens a second of a batch, its prompts computed before."""
        self._switch(speculate)
        is_story = kind == "stories"
        params = SamplingParams(
            max_tokens=self._num_tokens, temperature=float(is_story), seed=number, ignore_eos=True
        )
        self.llm.engine.forget_prefixes()
        self._chat(kind, batch, number, replace(params, max_tokens=1))
        start = time.perf_counter()
        outputs = self._chat(kind, batch, number, params)
        seconds = time.perf_counter() - start
        self._check(kind, batch, number, [one.outputs[0].token_ids for one in outputs])
        if speculate:
            drafts = [one.outputs[0].drafts for one in outputs]
            drafted = sum(one.num_drafted for one in drafts if one is not None)
            accepted = sum(one.num_accepted for one in drafts if one is not None)
            self.accepted.setdefault(kind, []).append(100 * accepted / max(drafted, 1))
        return batch * self._num_tokens / seconds

    def _chat(self, kind: str, batch: int, number: int, params: SamplingParams) -> list[RequestOutput]:
        known = conversations(kind, self._num_chars)
        asked = [known[(number + place) % len(known)] for place in range(batch)]
        return self.llm.chat(
            asked, params, add_generation_prompt=False, continue_final_message=True, progress=False
        )

    def _switch(self, speculate: bool) -> None:
        engine = self.llm.engine.core.engine  # type: ignore[attr-defined]  # one model serves both ways
        engine.config = replace(engine.config, speculate=speculate)

    def _check(self, kind: str, batch: int, number: int, token_ids: list[list[int]]) -> None:
        """Say where texts differ: rows of larger steps may have other last bits, and near ties turn."""
        first = self._texts.setdefault((kind, batch, number), token_ids)
        same = sum(mine == theirs for mine, theirs in zip(first, token_ids, strict=True))
        if same < len(first):
            print(f"{kind}, batch {batch}, round {number}: {len(first) - same} of {len(first)} texts differ")


def figures(race: Race, options: Options) -> list[Figure]:
    """Every kind at every batch size, and how many drafts were right."""
    found = []
    for kind, alone in (("code editing", COPYING), ("summaries with quotes", COPYING), ("stories", FREE)):
        for batch in BATCHES[:1] if options.is_smoke else BATCHES:
            contestants = {
                OURS: partial(race.measure, kind, batch, True),
                PLAIN: partial(race.measure, kind, batch, False),
            }
            samples, notes = alternate(contestants, options.rounds)
            found.append(
                Figure(
                    name=f"{kind}, {batch} at once",
                    unit="tokens/s",
                    better="higher",
                    samples=samples,
                    targets=alone if batch == 1 else FREE,  # steps of more rows have little time to spare
                    notes=notes,
                )
            )
    return [*found, Figure(name="drafts that were right", unit="%", better="higher", samples=race.accepted)]


def main() -> None:
    """Race with and without drafts."""
    options = parse_options(__doc__ or "")
    race = Race(options)
    with race.llm:
        measured = figures(race, options)
    publish(Path(__file__).stem, measured, options)


if __name__ == "__main__":
    main()
