import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from logprobe.kernels.layers.rotary import ROWS_FOR_THREADS, Projections, rotate_and_store

KV_HEADS = 2


def angles(num_tokens: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.randperm(5000)[:num_tokens].float()
    half = positions[:, None] / 10000 ** (torch.arange(dim // 2) / (dim // 2))
    both = torch.cat([half, half], dim=1)
    return both.cos(), both.sin()


@pytest.mark.parametrize(
    ("heads", "key_dim", "value_dim"), [(6, 16, 16), (2, 2, 5), (4, 64, 32)], ids=["grouped", "odd", "wide"]
)
@pytest.mark.parametrize("num_tokens", [1, 2, 17, ROWS_FOR_THREADS, 300])
def test_views_of_a_joined_product_are_rotated_as_by_transformers_and_stored(
    num_tokens: int, heads: int, key_dim: int, value_dim: int
) -> None:
    torch.manual_seed(num_tokens)
    widths = [heads * key_dim, KV_HEADS * key_dim, KV_HEADS * value_dim]
    query, key, value = torch.randn(num_tokens, sum(widths)).split(widths, dim=1)
    cosines, sines = angles(num_tokens, key_dim)
    slots = torch.randperm(333)[:num_tokens]
    pool = torch.randn(333, KV_HEADS, key_dim), torch.randn(333, KV_HEADS, value_dim)
    by_head = [part.unflatten(1, (-1, key_dim))[None].transpose(1, 2) for part in (query, key)]
    want_query, want_key = apply_rotary_pos_emb(*by_head, cosines[None], sines[None])
    want_keys = pool[0].index_copy(0, slots, want_key[0].transpose(0, 1))
    want_values = pool[1].index_copy(0, slots, value.unflatten(1, (-1, value_dim)))

    got = rotate_and_store(Projections(query, key, value), cosines, sines, pool, slots)

    torch.testing.assert_close(got, want_query[0].transpose(0, 1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(pool[0], want_keys, rtol=1e-6, atol=1e-6)
    assert torch.equal(pool[1], want_values)


def test_the_projections_stay_as_they_are() -> None:
    joined = torch.randn(5, 3 * 8)
    before = joined.clone()
    pool = torch.zeros(9, 1, 8), torch.zeros(9, 1, 8)
    rotate_and_store(Projections(*joined.split(8, dim=1)), *angles(5, 8), pool, torch.arange(5))
    assert torch.equal(joined, before)
