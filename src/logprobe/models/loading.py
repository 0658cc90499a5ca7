"""A model's folder → the transformers module and the tokenizer, ready for exact use.

Follows `resolve`; the engine takes the module and the tokenizer from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from logprobe.errors import UnsupportedModelError
from logprobe.models.resolution import checked_folder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

    from logprobe.kernels.layers.forms import PanelWeights
    from logprobe.models.resolution import ModelFiles


def load_model(
    files: ModelFiles,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    attn_implementation: str = "eager",
) -> PreTrainedModel:
    """Load the causal language model from safetensors, for inference only; no code of the folder is run.

    Raises:
        ModelNotFoundError: the folder lacks a file.
        UnsupportedModelError: transformers has no such model, or the weights are not safetensors.
    """
    from transformers import AutoModelForCausalLM

    folder = checked_folder(files.folder)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attn_implementation,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModelError(
            f"{files.name}: transformers cannot load it ({_first_line(error)})"
        ) from error
    ready: PreTrainedModel = model.to(device).eval().requires_grad_(requires_grad=False)
    return ready


def load_panels(files: ModelFiles) -> dict[str, PanelWeights]:
    """Map the matrices that a GGUF file was published with, by the name of their module; none elsewhere."""
    from logprobe.models.gguf.panels import read_panels

    return read_panels(files.folder)


def load_tokenizer(files: ModelFiles) -> PreTrainedTokenizerFast:
    """Load the tokenizer that `tokenizer.json` describes, exactly as it stands there.

    `encode` and `__call__` add no BOS or EOS unless called with `add_special_tokens=True`, which follows the
    model's own policy. Decoding never tidies spaces.

    Raises:
        ModelNotFoundError: the folder lacks a file.
        UnsupportedModelError: the file cannot be read.
    """
    from logprobe.models.tokenizer import ExactTokenizer

    folder = checked_folder(files.folder)
    try:
        tokenizer: PreTrainedTokenizerFast = ExactTokenizer.from_pretrained(
            folder, local_files_only=True, clean_up_tokenization_spaces=False
        )
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModelError(
            f"{files.name}: tokenizer.json cannot be read ({_first_line(error)})"
        ) from error
    return tokenizer


def text_config(config: PreTrainedConfig) -> Any:
    """Give the language model's part of a config that may also describe images or sound."""
    return config.get_text_config(decoder=True)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
