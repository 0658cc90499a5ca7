from bench_next_token import HTTP, VIRTUAL, split
from harness import FLOOR, OURS

NATIVE = {FLOOR: [9.0], OURS: [8.0], "genlm best": [1.0], "vllm best": [2.0], HTTP: [7.0]}


def test_what_runs_in_vllm_is_a_figure_of_its_own_from_the_same_race() -> None:
    native, in_vllm = split({**NATIVE, VIRTUAL: [6.0], "genlm_vllm default": [3.0]}, ["a note"], "asked")
    assert native.samples == NATIVE
    assert in_vllm.samples == {OURS: [6.0], "vllm best": [2.0], "genlm_vllm default": [3.0]}
    assert [in_vllm.verdict(target) for target in in_vllm.targets] == ["missed"]
    assert native.notes == in_vllm.notes == ["a note"]


def test_without_vllm_there_is_the_native_figure_alone() -> None:
    [native] = split({OURS: [8.0]}, [], "asked")
    assert [native.verdict(target) for target in native.targets] == ["not measured"] * 3
