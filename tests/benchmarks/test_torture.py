"""What the long run keeps of a layout."""

import json
import sys
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "torture"))

import torture


def test_what_became_of_a_layout_is_kept_as_json() -> None:
    ended, faults = Counter(result=7, left=2), Counter(killed=1)
    tally = torture.Tally("one process", True, 3.75, ended, faults, replayed=5, numbers=100)
    kept = json.loads(json.dumps(torture.as_content(tally)))
    assert (kept["sent"], kept["ended"], kept["faults"]) == (9, {"result": 7, "left": 2}, {"killed": 1})
    assert (kept["layout"], kept["numbers"], kept["differing"]) == ("one process", 100, 0)
    assert "9 sent in 3.8 min (2 left, 7 result; 1 killed)" in torture.as_line(tally)


def test_only_a_whole_run_without_losses_is_well() -> None:
    assert torture.Tally("one process", True, 1.0, Counter(result=7)).is_well
    for ended in (Counter(lost=1), Counter(wrong=1)):
        assert not torture.Tally("one process", True, 1.0, ended).is_well
    assert not torture.Tally("one process", True, 1.0, differing=1).is_well
    assert torture.Tally("vLLM", False, 1.0, differing=1).is_well
    assert not torture.Tally("vLLM", False, 1.0, left_behind={"slots": 1}).is_well
