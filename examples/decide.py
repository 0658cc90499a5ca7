"""From a question to a decision: label texts, see how far the model's certainty holds, and where to trust it.

Run `python examples/decide.py` (the default model is fetched once); `--plot sure.png` draws the calibration
(it needs matplotlib). Half of the labelled lines choose from which certainty on a label is taken, and the
other half, which had no say in that, tells how it went. What stays below goes to a person.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from logprobe import LLM
from logprobe.analysis import measures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.analysis import Classification

# Two examples, so that the model answers with a label at all: see how the mean mass falls without them.
PROMPT = (
    "Review: I love it.\nSentiment: positive\n\nReview: I hate it.\nSentiment: negative\n\n"
    "Review: {}\nSentiment:"
)
POSITIVE, NEGATIVE = LABELS = (" positive", " negative")
REVIEWS = (
    ("I would buy it again tomorrow.", POSITIVE),
    ("It broke on the first day.", NEGATIVE),
    ("My children love it.", POSITIVE),
    ("A waste of money.", NEGATIVE),
    ("The best kettle I have ever had.", POSITIVE),
    ("The handle came off in my hand.", NEGATIVE),
    ("Arrived early and works perfectly.", POSITIVE),
    ("Nobody answers the phone.", NEGATIVE),
    ("Five stars are not enough.", POSITIVE),
    ("It smells of burnt plastic.", NEGATIVE),
    ("So quiet that I forget it is on.", POSITIVE),
    ("I sent it back after a week.", NEGATIVE),
    ("Light, strong and cheap.", POSITIVE),
    ("The colour came off in the wash.", NEGATIVE),
    ("Just what I was looking for.", POSITIVE),
    ("The instructions are useless.", NEGATIVE),
    ("It has never let me down.", POSITIVE),
    ("I expected better at this price.", NEGATIVE),
    ("Beautiful, and easy to clean.", POSITIVE),
    ("Half of the parts were missing.", NEGATIVE),
    ("I cannot imagine my kitchen without it.", POSITIVE),
    ("Loud enough to wake the neighbours.", NEGATIVE),
    ("Great value for a student.", POSITIVE),
    ("It stopped charging after a month.", NEGATIVE),
    ("Not bad at all.", POSITIVE),
    ("Not what the picture shows.", NEGATIVE),
    ("Thank you, it made my day.", POSITIVE),
    ("Never again.", NEGATIVE),
    ("We use it every single day.", POSITIVE),
    ("The lid does not close.", NEGATIVE),
    ("Worth every penny.", POSITIVE),
    ("Cheap, and it feels like it.", NEGATIVE),
)
MIN_MASS = 0.5  # less says that the model would have answered something else altogether


def labelled(llm: LLM, texts: Sequence[str]) -> list[Classification]:
    """The labels of some texts."""
    found = llm.classify([PROMPT.format(text) for text in texts], LABELS)
    assert isinstance(found, list)
    return found


def certainty(found: Classification) -> float:
    """The share of the label that is said."""
    return found.probabilities[found.label]


def decision(found: Classification, least: float | None) -> str | None:
    """The label where the model is sure enough, and None where a person is to look."""
    is_sure = least is not None and found.mass >= MIN_MASS and certainty(found) >= least
    return found.label.strip() if is_sure else None


def main() -> None:
    """Choose on one half, look at the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--accuracy", type=float, default=0.9, help="of what is not shown to a person")
    parser.add_argument("--plot", help="a picture of the calibration, such as sure.png")
    arguments = parser.parse_args()
    with LLM(arguments.model) as llm:
        found = labelled(llm, [text for text, _ in REVIEWS])
    sure = [certainty(one) for one in found]
    is_right = [one.label == label for one, (_, label) in zip(found, REVIEWS, strict=True)]
    bins = measures.calibration(sure, is_right, num_bins=5)
    print(f"{bins}\nmean mass {sum(one.mass for one in found) / len(found):.3f}")
    if arguments.plot:
        bins.plot().save(arguments.plot)
    half = len(REVIEWS) // 2
    least = measures.threshold(sure[:half], is_right[:half], accuracy=arguments.accuracy)
    print(f"of the first {half}: right {sum(is_right[:half])}, to be taken from a certainty of {least}")
    for one, (text, _) in zip(found[half:], REVIEWS[half:], strict=True):
        said = decision(one, least) or "ask a person"
        print(f"{said:12}  {certainty(one):.3f}  {text}")
    taken = [right for one, right in zip(found[half:], is_right[half:], strict=True) if decision(one, least)]
    print(f"of the other {half}: taken {len(taken)}, of them right {sum(taken)}")


if __name__ == "__main__":
    main()
