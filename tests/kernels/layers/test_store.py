import pytest
import torch

from logprobe.kernels.layers.store import MAX_ROWS, store_rows


def pools(num_slots: int, kv_heads: int, key_dim: int, value_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make pools where every number encodes its position."""
    sizes = ((num_slots, kv_heads, dim) for dim in (key_dim, value_dim))
    key_pool, value_pool = (torch.arange(a * b * c).view(a, b, c).float() for a, b, c in sizes)
    return key_pool, -value_pool


@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 16), (5, 3), (1, 64)])
@pytest.mark.parametrize("num_tokens", [1, 2, MAX_ROWS, MAX_ROWS + 1, 300])
def test_scattered_slots_are_filled_as_by_index_copy(num_tokens: int, key_dim: int, value_dim: int) -> None:
    torch.manual_seed(num_tokens)
    key, value = torch.randn(num_tokens, 3, key_dim), torch.randn(num_tokens, 3, value_dim)
    slots = torch.randperm(333)[:num_tokens]
    got, want = pools(333, 3, key_dim, value_dim), pools(333, 3, key_dim, value_dim)
    store_rows(key, got[0], value, got[1], slots)
    for pool, rows in zip(want, (key, value), strict=True):
        pool.index_copy_(0, slots, rows)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_keys_and_values_may_be_views_as_attention_gets_them() -> None:
    torch.manual_seed(0)
    key, value = (torch.randn(1, 2, 90, dim).transpose(1, 2)[0] for dim in (8, 6))
    assert not key.is_contiguous()
    slots = torch.arange(89, -1, -1)
    key_pool, value_pool = pools(90, 2, 8, 6)
    store_rows(key, key_pool, value, value_pool, slots)
    assert torch.equal(key_pool, key.flip(0))
    assert torch.equal(value_pool, value.flip(0))


def test_numbers_arrive_with_all_their_bits() -> None:
    special = torch.tensor([torch.nan, torch.inf, -0.0, 2.0**-149]).view(1, 1, 4)
    key_pool, value_pool = pools(3, 1, 4, 4)
    store_rows(special, key_pool, special, value_pool, torch.tensor([1]))
    for pool in (key_pool, value_pool):
        assert torch.equal(pool[1].view(torch.int32), special[0].view(torch.int32))
