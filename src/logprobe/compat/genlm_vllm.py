"""`AsyncVirtualLM` with genlm-backend's names; in a separate module, because it needs torch."""

from __future__ import annotations

import torch

from logprobe.compat.genlm_names import AsyncLM, GenlmNames
from logprobe.integrations.vllm import virtual_lm


@AsyncLM.register
class AsyncVirtualLM(GenlmNames[torch.Tensor], virtual_lm.AsyncVirtualLM):
    """`logprobe.next_token.AsyncVirtualLM` with genlm-backend's names."""
