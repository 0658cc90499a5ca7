"""Rotary position embedding (Su et al. 2021), and the methods for scaling it to longer texts.

The first `width` dimensions of a head rotate in pairs. Pair i rotates by the angle position · frequency[i],
with frequency[i] = theta^(-2i / width). Scaling methods lower the frequencies, mostly of slow pairs, and some
also multiply cosines and sines by a factor. Frequencies and angles have the dtype of the settings: float64,
or float32 as in transformers, where the angle of a late position has an error of up to 1e-3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from logprobe.engine.forward.reference.weights import Array

ORIGINAL_LEN: Final = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """The rotary embedding of a layer."""

    name: str | None  # layer type that has these parameters; None: all layers have them
    parameters: Mapping[str, Any]  # transformers' `rope_parameters` for this type of layer
    head_dim: int
    width: int  # number of dimensions that rotate, from the first on, in each head
    context_len: int  # `max_position_embeddings`
    is_truncated: bool = True  # with YaRN: round the bounds of the ramp to whole pairs
    dtype: type[np.floating[Any]] = np.float64  # of frequencies and angles

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number from `parameters`; a given `default` replaces one that is missing, null or 0."""
        value: float = self.parameters[name] if default is None else self.parameters.get(name) or default
        return value


def rotate(x: Array, cosines: Array, sines: Array, *, is_paired: bool) -> Array:
    """Return `x` with the first dimensions of each head rotated by the angles of the position.

    Args:
        x: (positions, heads, head size), queries or keys.
        cosines: (positions, pairs), from `cosines_and_sines`.
        sines: (positions, pairs).
        is_paired: True: pairs are adjacent dimensions (interleaved); False: a pair is dimension i of each
            half of the rotated dimensions.
    """
    width = 2 * cosines.shape[1]
    rotated, rest = x[..., :width], x[..., width:]
    axis = -1 if is_paired else -2
    pairs = rotated.reshape(*x.shape[:-1], *((-1, 2) if is_paired else (2, -1)))
    first, second = np.moveaxis(pairs, axis, 0)  # (positions, heads, pairs) each
    cosines, sines = cosines[:, None], sines[:, None]
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    return np.concatenate((np.stack(turned, axis=axis).reshape(rotated.shape), rest), axis=-1)


def cosines_and_sines(rotary: Rotary, positions: NDArray[np.int64]) -> tuple[Array, Array]:
    """Return the scaled cosines and sines of all angles in a text, both (positions, pairs) float64."""
    angles = positions[:, None].astype(rotary.dtype) * frequencies(rotary, int(positions.max()) + 1)
    factor, exact = attention_factor(rotary), angles.astype(np.float64)
    return factor * np.cos(exact), factor * np.sin(exact)


def frequencies(rotary: Rotary, num_tokens: int) -> NDArray[np.floating[Any]]:
    """Return a layer's frequencies (pairs,) for a text of `num_tokens`, in the dtype of `rotary`."""
    return FREQUENCIES[rotary.parameters["rope_type"]](rotary, num_tokens).astype(rotary.dtype)


def attention_factor(rotary: Rotary) -> float:
    """Return the factor for cosines and sines, which makes attention sharper in longer texts."""
    kind = rotary.parameters["rope_type"]
    if kind not in {"yarn", "longrope"}:
        return 1.0
    if rotary.parameters.get("attention_factor") is not None:
        return rotary.number("attention_factor")
    growth = math.log(max(_extension(rotary), 1))
    if kind == "longrope":
        return math.sqrt(1 + growth / math.log(rotary.number(ORIGINAL_LEN)))
    over, under = rotary.number("mscale", 0), rotary.number("mscale_all_dim", 0)
    if over and under:  # DeepSeek-V2 (2024)
        return (0.1 * over * growth + 1) / (0.1 * under * growth + 1)
    return 0.1 * growth + 1


def unscaled(rotary: Rotary, _num_tokens: int = 0) -> Array:
    """Return theta^(-2i / width), (pairs,)."""
    return _powers(rotary, rotary.number("rope_theta"), rotary.width)


def linear(rotary: Rotary, _num_tokens: int) -> Array:
    """Return all frequencies divided by a factor, which interpolates positions (Chen et al. 2023)."""
    return unscaled(rotary) / rotary.number("factor")


def dynamic(rotary: Rotary, num_tokens: int) -> Array:
    """Return frequencies with a larger theta if the text is longer than the context length.

    This is dynamic NTK scaling (bloc97, emozilla 2023): the slowest frequency is divided as with linear
    scaling, and the fastest does not change.
    """
    factor = rotary.number("factor")
    stretch = factor * max(num_tokens, rotary.context_len) / rotary.context_len - (factor - 1)
    exponent = rotary.width / (rotary.width - 2)
    return _powers(rotary, rotary.number("rope_theta") * stretch**exponent, rotary.width)


def proportional(rotary: Rotary, _num_tokens: int) -> Array:
    """Return the frequencies of a head's pairs; they are 0 but for the fastest `partial_rotary_factor`."""
    num_rotating = int(rotary.number("partial_rotary_factor", 1.0) * rotary.head_dim // 2)
    powers = _powers(rotary, rotary.number("rope_theta"), rotary.head_dim)
    powers[num_rotating:] = 0
    return powers / rotary.number("factor", 1.0)


def llama3(rotary: Rotary, _num_tokens: int) -> Array:
    """Divide low frequencies by a factor, keep high ones, and blend those between (Llama 3.1, 2024)."""
    powers = unscaled(rotary)
    slow, fast = rotary.number("low_freq_factor"), rotary.number("high_freq_factor")
    turns = rotary.number(ORIGINAL_LEN) * powers / (2 * math.pi)
    kept = np.clip((turns - slow) / (fast - slow), 0, 1)
    return kept * powers + (1 - kept) * powers / rotary.number("factor")


def yarn(rotary: Rotary, _num_tokens: int) -> Array:
    """Divide low frequencies by a factor, keep high ones, and blend those between (YaRN).

    The weight of the blend is linear in the index of the pair (Peng et al. 2023).
    """
    powers = unscaled(rotary)

    def pair_of(num_turns: float) -> float:
        """Return the (fractional) index of the pair that turns `num_turns` times in the original context."""
        wave = rotary.number(ORIGINAL_LEN) / (num_turns * 2 * math.pi)
        return rotary.width * math.log(wave) / (2 * math.log(rotary.number("rope_theta")))

    low, high = pair_of(rotary.number("beta_fast", 32)), pair_of(rotary.number("beta_slow", 1))
    if rotary.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.width - 1)
    high += 0.001 if low == high else 0  # as the authors' code does
    divided: Array = np.clip((np.arange(rotary.width // 2) - low) / (high - low), 0, 1)
    return (1 - divided) * powers + divided * powers / _extension(rotary)


def longrope(rotary: Rotary, num_tokens: int) -> Array:
    """Divide each frequency by its own factor, which differs for short and long texts (Ding et al. 2024)."""
    is_long = num_tokens > rotary.number(ORIGINAL_LEN)
    divisors: Array = np.array(rotary.parameters["long_factor" if is_long else "short_factor"])
    return unscaled(rotary) / divisors


# transformers' `rope_type` → function of the rotary embedding and the text's length that returns (pairs,)
# frequencies
FREQUENCIES: Final[dict[str, Callable[[Rotary, int], Array]]] = {
    "default": unscaled,
    "linear": linear,
    "dynamic": dynamic,
    "proportional": proportional,
    "llama3": llama3,
    "yarn": yarn,
    "longrope": longrope,
}


def _powers(rotary: Rotary, theta: float, width: int) -> Array:
    """Return theta^(-2i / width), (pairs,), with exponents, powers and quotients rounded to the dtype."""
    exponents = (np.arange(0, width, 2) / width).astype(rotary.dtype)
    powers: Array = 1 / np.power(theta, exponents.astype(np.float64)).astype(rotary.dtype)
    return powers


def _extension(rotary: Rotary) -> float:
    """Return the ratio of the maximum text length to the original context length."""
    return rotary.number("factor", rotary.context_len / rotary.number(ORIGINAL_LEN))
