from __future__ import annotations

from rich.cells import cell_len

from logprobe.cli.tables import table


def test_columns_stay_aligned_with_wide_characters() -> None:
    lines = table([["#", "token", "x"], ["0", "🌊", "1"], ["10", "漢字", "22"]]).splitlines()
    assert lines[0] == " #  token   x"
    assert len({cell_len(line) for line in lines}) == 1


def test_a_line_may_end_early_and_leaves_no_space_behind() -> None:
    assert table([["a", "b"], ["long"]], is_left=[True, True]) == "a     b\nlong"
