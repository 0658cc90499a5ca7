"""Next-token distributions ("rows") quantized to 1 or 2 bits per entry, with bounds on the resulting error.

A probability p is stored as an integer c (its "code"), and p' = (c / n)² approximates p, where n is the scale
of the row. c is one of the two integers around n √p, chosen at random so that the expectation of p' is p
(stochastic rounding): where p is far below 1 / n², c is mostly 0, occasionally 1. A larger n takes more bits.
For the divergence from any other row q,

    KL(p, q) = Σ p log(p / q),

Σ p' log(p / q) is an unbiased estimate. The first part of this sum, Σ p' log p, is stored with the row, and
the second part is computed when q is known. Entries are rounded independently, each with a variance of at
most p / n², so the standard error is at most √(Σ p log²(p / q)) / n. (Because codes are proportional to √p,
the variance of p' is proportional to p, as the variance of a count is to the mean.)
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from logprobe.errors import InputError

if TYPE_CHECKING:
    import numpy.typing as npt

    Codes = npt.NDArray[np.uint16]
    Floats = npt.NDArray[np.float64]
    Singles = npt.NDArray[np.float32]

IMPOSSIBLE: Final = 0xFFFF  # the code of a token of probability 0
IMPOSSIBLE_LENGTH: Final = 15
MAX_SCALE: Final = 16_000  # 4 bits must hold the bit length of any code, and IMPOSSIBLE_LENGTH
SCALES: Final = tuple(round(MAX_SCALE * 2 ** (-step / 4)) for step in range(53))  # from 16,000 down to 2
ROW_FACTS: Final = ("cross", "low_logprob", "blur", "low_mass", "distance")
SAMPLED_ROWS: Final = 8  # number of rows used to estimate the scale
SEED: Final = 0x6C706B6C
_UP: Final = 1 + 2.0**-22  # factor that keeps an upper bound above the true value when rounded to float32
_LENGTHS: Final = np.array([code.bit_length() for code in range(MAX_SCALE + 2)], np.uint8)


class Divergence(NamedTuple):
    """Divergence of a stored row (p) from another row (q)."""

    kl: float  # KL(p, q), nats; an unbiased estimate
    kl_error: float  # upper bound of the standard error of `kl`, nats
    acceptance: float  # Σ min(p, q)
    acceptance_error: float  # upper bound of the error of `acceptance`


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRows:
    """N quantized rows over a vocabulary of V tokens; the module docstring defines p, p', n and codes."""

    scale: int  # n
    codes: Codes  # (N, V); IMPOSSIBLE where p is 0
    cross: Floats  # (N,) Σ p' log p, nats
    low_logprob: Singles  # (N,) mean log p over the entries with code 1, nats
    blur: Singles  # (N,) √(Σ p' log²(p / p')) / n, nats, with `low_logprob` for log p' where the code is 1
    low_mass: Singles  # (N,) Σ p over the entries with codes 0 and 1
    # (N,) the larger of Σ max(p - p', 0) and Σ max(p' - p, 0), if the entries with codes 0 and 1 share
    # `low_mass` evenly
    distance: Singles

    @classmethod
    def of(cls, logprobs: npt.ArrayLike, codes: Codes, scale: int) -> KeptRows:
        """Build rows from log-probabilities, (N, V) nats, and their codes from `drawn_codes` at `scale`."""
        rows = np.asarray(logprobs, np.float64)
        facts = np.array([_facts(row, code, scale) for row, code in zip(rows, codes, strict=True)])
        cross, *others = facts.reshape(-1, 5).T
        low_logprob, blur, low_mass, distance = (column.astype(np.float32) for column in others)
        return cls(
            scale=scale,
            codes=codes,
            cross=cross.copy(),
            low_logprob=low_logprob,
            blur=blur,
            low_mass=low_mass,
            distance=distance,
        )

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: slice) -> KeptRows:
        facts = {name: getattr(self, name)[rows] for name in ROW_FACTS}
        return KeptRows(scale=self.scale, codes=self.codes[rows], **facts)

    def against(self, row: int, logprobs: npt.ArrayLike) -> Divergence:
        """Return the divergence of row number `row` from another row, (V,) log-probabilities in nats."""
        codes, others = self.codes[row], np.asarray(logprobs, np.float64)
        acceptance, acceptance_error = self._acceptance(row, np.exp(others))
        if np.any(np.isneginf(others) & (codes != IMPOSSIBLE)):  # a token possible under p but not under q
            return Divergence(np.inf, 0.0, acceptance, acceptance_error)
        is_drawn = (codes > 0) & (codes != IMPOSSIBLE)
        codes, others = codes[is_drawn], others[is_drawn]
        weights, logs = _drawn(codes, self.scale, float(self.low_logprob[row]))
        kl = float(self.cross[row]) - float((weights * others).sum())
        spread = float(np.sqrt((weights * (logs - others) ** 2).sum())) / self.scale
        return Divergence(kl, spread + float(self.blur[row]), acceptance, acceptance_error)

    def _acceptance(self, row: int, others: Floats) -> tuple[float, float]:
        """Return Σ min(p, q) and an upper bound on its error; `others` is q.

        For entries with codes 0 and 1, only the sum of their p, `low_mass`, is known. The returned sum
        assumes that these p overlap with q as much as possible, so this part of the sum is not too low. If
        these entries shared `low_mass` evenly, the sum would be off by at most `distance`; the bound adds the
        difference between both sums.
        """
        codes, low_mass = self.codes[row], float(self.low_mass[row])
        least = np.minimum(_evened(codes, self.scale, low_mass), others)
        is_low = codes < 2
        evened = float(least.sum())
        acceptance = float(least[~is_low].sum()) + min(low_mass, float(others[is_low].sum()))
        return acceptance, float(self.distance[row]) + acceptance - evened


def drawn_codes(logprobs: Floats, scale: int, first_row: int) -> Codes:
    """Round √p · scale stochastically to integer codes, (N, V), given log p as `logprobs`, (N, V) nats.

    `first_row`, the index in the file of the first of the N rows, seeds the random numbers.
    """
    chances = np.random.Generator(np.random.Philox(key=[SEED, first_row])).random(logprobs.shape, np.float32)
    roots = np.exp(logprobs / 2) * scale
    codes = np.floor(roots)
    codes += chances < (roots - codes) * (roots + codes) / (2 * codes + 1)
    codes[np.isneginf(logprobs)] = IMPOSSIBLE
    whole: Codes = codes.astype(np.uint16)
    return whole


def _drawn(codes: Codes, scale: int, low_logprob: float) -> tuple[Floats, Floats]:
    """Return p' for codes above 0, and an approximation of log p for each."""
    roots = codes / scale
    return roots**2, np.where(codes == 1, low_logprob, 2 * np.log(roots))


def _evened(codes: Codes, scale: int, low_mass: float) -> Floats:
    """Return a deterministic approximation of p; entries with codes 0 and 1 share `low_mass` evenly."""
    is_low = codes < 2
    even = np.where(codes == IMPOSSIBLE, 0.0, (codes / scale) ** 2)
    even[is_low] = low_mass / max(int(np.count_nonzero(is_low)), 1)
    return even


def _facts(logprobs: Floats, codes: Codes, scale: int) -> tuple[float, ...]:
    """Return a row's `ROW_FACTS`, which `KeptRows` defines."""
    probabilities = np.exp(logprobs)
    low_mass = float(probabilities[codes < 2].sum())
    apart = probabilities - _evened(codes, scale, low_mass)
    distance = max(float(apart[apart > 0].sum()), -float(apart[apart < 0].sum()))
    is_drawn = (codes > 0) & (codes != IMPOSSIBLE)
    codes, logprobs = codes[is_drawn], logprobs[is_drawn]
    low = logprobs[codes == 1]
    low_logprob = float(np.float32(low.mean())) if len(low) else 0.0
    weights, logs = _drawn(codes, scale, low_logprob)
    blur = float(np.sqrt((weights * (logprobs - logs) ** 2).sum())) / scale
    return float((weights * logprobs).sum()), low_logprob, blur * _UP, low_mass, distance * _UP


# -- serialization -------------------------------------------------------------------------------------------


class Packed(NamedTuple):
    """Packed codes: their deflated bit lengths, and the bits below each code's leading bit as bit planes."""

    lengths: bytes
    planes: bytes

    @property
    def num_bytes(self) -> int:
        """Total size in bytes."""
        return len(self.lengths) + len(self.planes)


def kept_within(logprobs: npt.ArrayLike, max_bytes: int, first_row: int) -> tuple[KeptRows, Packed]:
    """Quantize rows at the finest scale whose codes fit in `max_bytes`, or at the coarsest if none fits."""
    rows = np.asarray(logprobs, np.float64)
    for scale in SCALES[_guess(rows, max_bytes) :]:
        codes = drawn_codes(rows, scale, first_row)
        packed = pack(codes)
        if packed.num_bytes <= max_bytes:
            break
    return KeptRows.of(rows, codes, scale), packed


def _guess(rows: Floats, max_bytes: int) -> int:
    """Estimate the index of the finest scale that fits from a sample of rows; that scale may be too fine."""
    sample = rows[:: -(-len(rows) // SAMPLED_ROWS)]
    share = max_bytes * len(sample) / len(rows)
    low, high = 0, len(SCALES) - 1
    while low < high:
        middle = (low + high) // 2
        if pack(drawn_codes(sample, SCALES[middle], 0)).num_bytes <= share:
            high = middle
        else:
            low = middle + 1
    return max(low - 1, 0)


def pack(codes: Codes) -> Packed:
    """Pack codes into bytes for `unpack`.

    Each byte holds the bit lengths of two codes. Only a few byte values are frequent, so deflate compresses
    the lengths well. The bits below the leading bit are noise and are stored uncompressed.
    """
    flat = codes.ravel()
    is_impossible = flat == IMPOSSIBLE
    lengths = _LENGTHS[np.where(is_impossible, 0, flat)]
    planes, values, left = [], flat[(lengths > 1)], lengths[lengths > 1]
    bit = 0
    while len(values):
        planes.append(np.packbits((values >> bit & 1).astype(np.uint8)).tobytes())
        bit += 1
        goes_on = left > bit + 1
        values, left = values[goes_on], left[goes_on]
    lengths[is_impossible] = IMPOSSIBLE_LENGTH
    pairs = np.append(lengths, np.uint8(0)) if len(lengths) % 2 else lengths
    deflate = zlib.compressobj(level=9, memLevel=9, strategy=zlib.Z_RLE)
    data = deflate.compress((pairs[0::2] << 4 | pairs[1::2]).tobytes()) + deflate.flush()
    return Packed(data, b"".join(planes))


def unpack(packed: Packed, num_rows: int, vocabulary_size: int) -> Codes:
    """Return the codes, (num_rows, vocabulary_size), that untrusted bytes contain.

    Raises:
        InputError: the bytes are damaged, or contain more or fewer codes.
    """
    num_codes = num_rows * vocabulary_size
    pairs = np.frombuffer(_inflated(packed.lengths, -(-num_codes // 2)), np.uint8)
    lengths = np.stack([pairs >> 4, pairs & 0xF], axis=1).ravel()[:num_codes]
    codes = np.where(lengths > 0, np.uint16(1) << np.maximum(lengths, 1).astype(np.uint16) - 1, 0)
    codes = codes.astype(np.uint16)
    codes[lengths == IMPOSSIBLE_LENGTH] = IMPOSSIBLE
    places = np.flatnonzero((lengths > 1) & (lengths < IMPOSSIBLE_LENGTH))
    start, bit = 0, 0
    while len(places):
        stop = start + -(-len(places) // 8)
        _require(stop <= len(packed.planes), "its codes are truncated")
        bits = np.unpackbits(np.frombuffer(packed.planes, np.uint8, stop - start, start), count=len(places))
        codes[places] |= bits.astype(np.uint16) << bit
        start, bit = stop, bit + 1
        places = places[lengths[places] > bit + 1]
    _require(start == len(packed.planes), "it has further data after its codes")
    return codes.reshape(num_rows, vocabulary_size)


def _inflated(data: bytes, num_bytes: int) -> bytes:
    """Inflate data to exactly `num_bytes` bytes without allocating more, even for malicious data."""
    inflate = zlib.decompressobj()
    try:
        found = inflate.decompress(data, num_bytes + 1)
    except zlib.error as error:
        raise InputError(f"the baseline is damaged: its codes cannot be read ({error})") from error
    is_whole = len(found) == num_bytes and inflate.eof and not inflate.unused_data
    _require(is_whole, "the number of codes does not match the number of rows")
    return found


def _require(is_so: object, message: str) -> None:
    if not is_so:
        raise InputError(f"the baseline is damaged: {message}")
