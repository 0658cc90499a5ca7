"""`bench_gpu.py` on a CPU: small runs of its sections, and sections that crash or hang."""

import json
import time
from pathlib import Path
from typing import Any

import bench_gpu
import numpy as np
import pytest
import torch
from bench_gpu import SECTIONS, Results, Sizes
from gpu_models import random_model, reference_logprobs

pytest.importorskip("triton", reason="Triton, whose interpreter runs the decoder, has no build here")

BITS = {"differing": 0, "largest": 0.0}


def rows_by_figure(section: Any) -> dict[str, list[Any]]:
    rows: dict[str, list[Any]] = {}
    for row in section["rows"]:
        rows.setdefault(row["figure"], []).append(row)
    return rows


def test_every_section_measures_and_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (work, _) in list(SECTIONS.items()):
        monkeypatch.setitem(SECTIONS, name, (work, 1e6))  # a busy machine exceeds normal budgets
    results = Results(path=tmp_path / "gpu.json", content={"sections": {}})
    assert bench_gpu.measure(results, list(SECTIONS), Sizes.small(), time.time() + 1e6) == 0
    read = json.loads(results.path.read_text())
    assert [section.get("error") for section in read["sections"].values()] == [None] * len(SECTIONS)
    assert list(read["sections"]) == list(SECTIONS)
    assert all(section["rows"] and "not_run" not in section for section in read["sections"].values())
    assert read["running"] is None

    exact = rows_by_figure(read["sections"]["accuracy"])
    by_arithmetic = {row["arithmetic"]: row for row in exact["logprobe"] + exact["transformers"]}
    assert by_arithmetic["float32"]["chosen_max_nats"] < 1e-5 < by_arithmetic["bfloat16"]["chosen_max_nats"]
    assert by_arithmetic["bf16x3"]["top20_max_nats"] < 1e-5
    drawn = rows_by_figure(read["sections"]["bits"])["sampled = scored, log-probabilities"]
    assert [row["rows"] for row in drawn] == [2 * 2]
    # The interpreter uses NumPy, whose summation order depends on the shape.
    assert all(row["largest"] < 1e-4 for row in read["sections"]["bits"]["rows"])


def test_rows_that_differ_in_a_bit_are_counted(tmp_path: Path) -> None:
    results = Results(path=tmp_path / "gpu.json", content={"sections": {"bits": {"rows": []}}})
    run = bench_gpu.Run(results=results, sizes=Sizes.small(), device="cpu", section="bits")
    wanted = torch.randn(3, 4)
    found = wanted.clone()
    bench_gpu._add_bits(run, "same", found, wanted)
    found[1, 2] = torch.nextafter(found[1, 2], torch.tensor(torch.inf))
    bench_gpu._add_bits(run, "other", found, wanted)
    same, other = results.sections["bits"]["rows"]
    assert same == {"figure": "same", "rows": 3} | BITS
    assert (other["differing"], other["rows"]) == (1, 3)
    assert 0 < other["largest"] < 1e-6


def test_the_reference_is_the_model_in_float64() -> None:
    model = random_model("tiny", "cpu")
    ids = np.random.default_rng(0).integers(2, 500, 40)
    reference = reference_logprobs(model, ids)
    assert reference.dtype == torch.float64
    with torch.inference_mode():
        found = model.float()(torch.from_numpy(ids)[None]).logits[0].double().log_softmax(-1)
    torch.testing.assert_close(found, reference, rtol=0, atol=2e-5)


def test_a_section_that_fails_is_recorded_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> None:
        raise ValueError("out of range")

    monkeypatch.setitem(SECTIONS, "decode", (fail, 10.0))
    results = Results(path=tmp_path / "gpu.json", content={"sections": {}})
    bench_gpu.measure(results, ["decode", "machine"], Sizes.small(), time.time() + 600)
    assert "ValueError: out of range" in results.sections["decode"]["error"]
    assert results.sections["machine"]["rows"]


def test_a_section_without_time_is_listed_as_not_run(tmp_path: Path) -> None:
    results = Results(path=tmp_path / "gpu.json", content={"sections": {}})
    bench_gpu.measure(results, ["machine"], Sizes.small(), time.time() - 1)
    assert results.sections["machine"]["not_run"]
    assert not results.sections["machine"]["rows"]


@pytest.mark.parametrize("ending", ["os._exit(5)", "time.sleep(600)"])
def test_a_section_that_ends_its_process_or_hangs_costs_no_other_section(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "child.py"
    script.write_text(f"""
import json, os, sys, time
path = sys.argv[sys.argv.index("--out") + 1]
name, *rest = sys.argv[sys.argv.index("--only") + 1].split(",")
content = json.load(open(path))
content["sections"][name] = {{"rows": [{{"figure": "a"}}]}}
content["running"] = {{"section": name, "until": time.time() + 1}} if name == "bits" else None
json.dump(content, open(path + ".new", "w"))
os.replace(path + ".new", path)
if name == "bits":
    {ending}
""")
    monkeypatch.setattr(bench_gpu, "__file__", str(script))
    out = tmp_path / "gpu.json"
    assert bench_gpu.main(["--small", "--only", "machine,bits,decode", "--out", str(out)]) == 1
    sections = json.loads(out.read_text())["sections"]
    assert list(sections) == ["machine", "bits", "decode"]
    assert [name for name, section in sections.items() if "error" in section] == ["bits"]
    assert sections["bits"]["rows"]


def test_the_figures_of_a_run_are_written_between_the_marks_of_a_page(tmp_path: Path) -> None:
    out, page = tmp_path / "gpu.json", tmp_path / "gpu.md"
    section = {"rows": [{"figure": "1 rows", "ms": 1.25}], "seconds": 1.0}
    content = {
        "machine": {"device": "A card"},
        "sections": {"decode": section, "bits": {"rows": [], "error": "x\ny"}},
    }
    out.write_text(json.dumps(content))
    page.write_text(f"before\n{bench_gpu.BEGIN}\nold\n{bench_gpu.END}\nafter\n")
    for _ in range(2):
        assert bench_gpu.main(["--page", str(page), "--out", str(out)]) == 0
        text = page.read_text()
        assert text.startswith("before\n")
        assert text.endswith("after\n")
        assert "| 1 rows | 1.25 |" in text
        assert "old" not in text
        assert "`y`" in text
        assert "A card" in text
