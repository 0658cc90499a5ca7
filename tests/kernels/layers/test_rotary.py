import pytest
import torch
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as apply_paired
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

from logprobe.kernels.layers.rows import ROWS_FOR_THREADS, Projections, rotary_stage

KV_HEADS = 2


def rotate_and_store(
    projections: Projections,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    pool: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
) -> torch.Tensor:
    """Return the rotated queries."""
    out = torch.empty(projections.query.shape)
    rotary_stage(projections, (cosines.contiguous(), sines.contiguous()), pool, slots, out).run()
    return out


def angles(num_tokens: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.randperm(5000)[:num_tokens].float()
    half = positions[:, None] / 10000 ** (torch.arange(dim // 2) / max(dim // 2, 1))
    both = torch.cat([half, half], dim=1)
    return both.cos(), both.sin()


@pytest.mark.parametrize(
    ("heads", "key_dim", "value_dim", "rotary_dim"),
    [(6, 16, 16, 16), (2, 2, 5, 2), (4, 64, 32, 64), (4, 16, 16, 12), (4, 10, 10, 2), (4, 16, 16, 0)],
    ids=["grouped", "odd", "wide", "three quarters", "a part", "nothing rotates"],
)
@pytest.mark.parametrize("num_tokens", [1, 2, 17, ROWS_FOR_THREADS, 300])
def test_views_of_a_joined_product_are_rotated_as_by_transformers_and_stored(
    num_tokens: int, heads: int, key_dim: int, value_dim: int, rotary_dim: int
) -> None:
    torch.manual_seed(num_tokens)
    widths = [heads * key_dim, KV_HEADS * key_dim, KV_HEADS * value_dim]
    query, key, value = (
        part.unflatten(1, (-1, dim))
        for part, dim in zip(
            torch.randn(num_tokens, sum(widths)).split(widths, dim=1),
            (key_dim, key_dim, value_dim),
            strict=True,
        )
    )
    assert_rotated_and_stored(Projections(query, key, value), rotary_dim)


def test_the_parts_of_a_head_may_lie_side_by_side() -> None:
    query, key, value = torch.randn(40, 6, 3, 16).unbind(2)  # the layout of GPT-NeoX's projection
    assert_rotated_and_stored(Projections(query, key, value), 4)


def assert_rotated_and_stored(projections: Projections, rotary_dim: int) -> None:
    query, key, value = projections.query, projections.key, projections.value
    num_tokens = len(query)
    cosines, sines = angles(num_tokens, rotary_dim)
    slots = torch.randperm(333)[:num_tokens]
    pool = torch.randn(333, *key.shape[1:]), torch.randn(333, *value.shape[1:])
    by_head = [part[None].transpose(1, 2) for part in (query, key)]
    want_query, want_key = apply_rotary_pos_emb(*by_head, cosines[None], sines[None])
    want_keys = pool[0].index_copy(0, slots, want_key[0].transpose(0, 1))
    want_values = pool[1].index_copy(0, slots, value)

    got = rotate_and_store(projections, cosines, sines, pool, slots)

    torch.testing.assert_close(got, want_query[0].transpose(0, 1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(pool[0], want_keys, rtol=1e-6, atol=1e-6)
    assert torch.equal(pool[1], want_values)


def test_the_projections_stay_as_they_are() -> None:
    joined = torch.randn(5, 3 * 8)
    before = joined.clone()
    pool = torch.zeros(9, 1, 8), torch.zeros(9, 1, 8)
    parts = joined.view(5, 3, 1, 8).unbind(1)
    rotate_and_store(Projections(*parts), *angles(5, 8), pool, torch.arange(5))
    assert torch.equal(joined, before)


@pytest.mark.parametrize(("key_dim", "rotary_dim"), [(16, 16), (2, 2), (64, 64), (10, 10), (16, 12), (16, 0)])
@pytest.mark.parametrize("num_tokens", [1, 17, 300])
def test_neighbours_are_rotated_together_as_in_cohere(num_tokens: int, key_dim: int, rotary_dim: int) -> None:
    torch.manual_seed(num_tokens)
    query, key = torch.randn(num_tokens, 6, key_dim), torch.randn(num_tokens, KV_HEADS, key_dim)
    cosines, sines = angles(num_tokens, rotary_dim)
    neighbours = [x[None, :, : rotary_dim // 2].repeat_interleave(2, dim=2) for x in (cosines, sines)]
    slots = torch.randperm(333)[:num_tokens]
    pool = torch.zeros(333, KV_HEADS, key_dim), torch.zeros(333, KV_HEADS, 5)
    out = torch.empty_like(query)

    projections = Projections(query, key, torch.randn(num_tokens, KV_HEADS, 5))
    rotary_stage(projections, (cosines, sines), pool, slots, out, is_paired=True).run()

    by_head = [x[None, ..., :rotary_dim].transpose(1, 2) for x in (query, key)]
    rotated = apply_paired(*by_head, *neighbours)
    for got, before, part in zip((out, pool[0][slots]), (query, key), rotated, strict=True):
        want = part[0].transpose(0, 1)
        torch.testing.assert_close(got[..., :rotary_dim], want, rtol=1e-6, atol=1e-6)
        assert torch.equal(got[..., rotary_dim:], before[..., rotary_dim:])
    assert torch.equal(pool[1][slots], projections.value)


@pytest.mark.parametrize("is_paired", [False, True])
def test_scales_multiply_the_rotated_queries_of_their_token_alone(*, is_paired: bool) -> None:
    torch.manual_seed(1)
    parts = Projections(torch.randn(40, 6, 20), torch.randn(40, KV_HEADS, 20), torch.randn(40, KV_HEADS, 8))
    rotary, slots, scales = angles(40, 12), torch.arange(40), torch.arange(40.0).log1p()
    plain, scaled = torch.empty_like(parts.query), torch.empty_like(parts.query)
    pools = [(torch.zeros(40, KV_HEADS, 20), torch.zeros(40, KV_HEADS, 8)) for _ in range(2)]
    rotary_stage(parts, rotary, pools[0], slots, plain, is_paired=is_paired).run()
    rotary_stage(parts, rotary, pools[1], slots, scaled, is_paired=is_paired, query_scales=scales).run()
    assert torch.equal(scaled, plain * scales[:, None, None])
    assert all(map(torch.equal, *pools))
