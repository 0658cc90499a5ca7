import pytest
import torch

from logprobe.kernels import threads
from logprobe.kernels.layers.rows import norm_stage
from logprobe.kernels.stages import Series, Stage
from norms import rms_norm


def chain(length: int) -> tuple[list[Stage], list[torch.Tensor]]:
    """Make norms, each of the one before, with enough rows for many items."""
    torch.manual_seed(length)
    rows = [torch.randn(200, 33), *(torch.zeros(200, 33) for _ in range(length))]
    weights = [torch.rand(33) + 0.5 for _ in range(length)]
    stages = [
        norm_stage(x, weight, out, 1e-5) for x, weight, out in zip(rows, weights, rows[1:], strict=False)
    ]
    want = rows[:1]
    for weight in weights:
        want.append(rms_norm(want[-1], weight, 1e-5))
    return stages, [*rows, *want]


@pytest.mark.parametrize("num_threads", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("length", [0, 1, 40])
def test_each_stage_sees_all_of_the_one_before_it(length: int, num_threads: int) -> None:
    stages, rows = chain(length)
    own = threads.num_threads()
    threads.set_num_threads(num_threads)
    try:
        series = Series(stages)
        for _ in range(3):
            for out in rows[1 : length + 1]:
                out.zero_()
            series.run()
            assert torch.equal(torch.stack(rows[: length + 1]), torch.stack(rows[length + 1 :]))
    finally:
        threads.set_num_threads(own)


def test_a_series_keeps_the_memory_that_it_writes() -> None:
    weight, out = torch.ones(33), torch.zeros(1, 33)
    series = Series([norm_stage(torch.full((1, 33), float(place)), weight, out, 1e-5) for place in (1, 4)])
    [torch.full((1, 33), 9.0) for _ in range(50)]  # would reuse freed memory
    series.run()
    torch.testing.assert_close(out, torch.ones(1, 33))


def test_stages_of_one_item_run_in_order_however_many_threads_find_none() -> None:
    stages, rows = chain(60)
    stages = [
        Stage("norm", "NormArgs", num_items=1, **stage.fields | {"block_rows": 200}) for stage in stages
    ]
    own = threads.num_threads()
    threads.set_num_threads(16)
    try:
        Series(stages).run()
    finally:
        threads.set_num_threads(own)
    assert torch.equal(rows[60], rows[-1])
