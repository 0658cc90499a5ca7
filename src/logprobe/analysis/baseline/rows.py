"""Whole rows of probabilities at a bit or two an entry, and what is left open so.

A probability p is kept as a whole number c near n √p, and p' = (c / n)² stands for it. Which of the two
numbers around n √p it is, is drawn so that p is what p' is in the mean: entries far below 1 / n² are mostly
0, now and then 1. The larger n, the more bits. Of the divergence from any other row q,

    KL(p, q) = Σ p log(p / q),

Σ p' log(p / q) is an estimate without bias, of which Σ p' log p is stored with the row, and the rest computed
when q is there. The draws of the entries are independent, each of a variance of at most p / n², so that its
standard error is at most √(Σ p log²(p / q)) / n. (In steps of √p, as the variance of a count is its mean.)
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
MAX_SCALE: Final = 16_000  # so that a code's bits are counted by 4 bits, with IMPOSSIBLE_LENGTH
SCALES: Final = tuple(round(MAX_SCALE * 2 ** (-step / 4)) for step in range(53))  # down to 2
ROW_FACTS: Final = ("cross", "low_logprob", "blur", "low_mass", "distance")
SAMPLED_ROWS: Final = 8  # by which a scale is guessed
SEED: Final = 0x6C706B6C
_UP: Final = 1 + 2.0**-22  # what is stored in float32 is never below what it bounds
_LENGTHS: Final = np.array([code.bit_length() for code in range(MAX_SCALE + 2)], np.uint8)


class Divergence(NamedTuple):
    """What another row gives against a kept one."""

    kl: float  # nats, from the other row to the kept one; an estimate without bias
    kl_error: float  # its standard error is at most that
    acceptance: float  # Σ min(p, q)
    acceptance_error: float  # it is at most so far off


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRows:
    """N rows over a vocabulary of V, as they are stored."""

    scale: int  # n
    codes: Codes  # (N, V), or IMPOSSIBLE
    cross: Floats  # (N,) Σ p' log p, nats
    low_logprob: Singles  # (N,) mean log p of the entries of code 1, nats
    blur: Singles  # (N,) √(Σ p' log²(p / p')) / n, nats, with that mean for log p' where the code is 1
    low_mass: Singles  # (N,) Σ p over the entries of codes 0 and 1
    # (N,) Σ max(p - p', 0) or Σ max(p' - p, 0), the larger, where these entries share their mass evenly
    distance: Singles

    @classmethod
    def of(cls, logprobs: npt.ArrayLike, codes: Codes, scale: int) -> KeptRows:
        """Rows of log-probabilities, (N, V) nats, with codes that `drawn_codes` gave at this scale."""
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
        """How far another row of log-probabilities, (V,) nats, is from a kept one."""
        codes, others = self.codes[row], np.asarray(logprobs, np.float64)
        acceptance, acceptance_error = self._acceptance(row, np.exp(others))
        if np.any(np.isneginf(others) & (codes != IMPOSSIBLE)):  # ruled out there, and not here
            return Divergence(np.inf, 0.0, acceptance, acceptance_error)
        is_drawn = (codes > 0) & (codes != IMPOSSIBLE)
        codes, others = codes[is_drawn], others[is_drawn]
        weights, logs = _drawn(codes, self.scale, float(self.low_logprob[row]))
        kl = float(self.cross[row]) - float((weights * others).sum())
        spread = float(np.sqrt((weights * (logs - others) ** 2).sum())) / self.scale
        return Divergence(kl, spread + float(self.blur[row]), acceptance, acceptance_error)

    def _acceptance(self, row: int, others: Floats) -> tuple[float, float]:
        """Σ min(p, q), and how far off it is at most.

        It is taken as if p went with q among the entries of codes 0 and 1, which cannot make it less. Evened
        there, p is no farther off than `distance`.
        """
        codes, low_mass = self.codes[row], float(self.low_mass[row])
        least = np.minimum(_evened(codes, self.scale, low_mass), others)
        is_low = codes < 2
        evened = float(least.sum())
        acceptance = float(least[~is_low].sum()) + min(low_mass, float(others[is_low].sum()))
        return acceptance, float(self.distance[row]) + acceptance - evened


def drawn_codes(logprobs: Floats, scale: int, first_row: int) -> Codes:
    """Draw whole numbers for rows of log-probabilities, (N, V) nats; `first_row` names the draws."""
    chances = np.random.Generator(np.random.Philox(key=[SEED, first_row])).random(logprobs.shape, np.float32)
    roots = np.exp(logprobs / 2) * scale
    codes = np.floor(roots)
    codes += chances < (roots - codes) * (roots + codes) / (2 * codes + 1)
    codes[np.isneginf(logprobs)] = IMPOSSIBLE
    whole: Codes = codes.astype(np.uint16)
    return whole


def _drawn(codes: Codes, scale: int, low_logprob: float) -> tuple[Floats, Floats]:
    """What stands for p at codes above 0, and about what log p was."""
    roots = codes / scale
    return roots**2, np.where(codes == 1, low_logprob, 2 * np.log(roots))


def _evened(codes: Codes, scale: int, low_mass: float) -> Floats:
    """A row in the place of p that is no draw: entries of codes 0 and 1 share their mass."""
    is_low = codes < 2
    even = np.where(codes == IMPOSSIBLE, 0.0, (codes / scale) ** 2)
    even[is_low] = low_mass / max(int(np.count_nonzero(is_low)), 1)
    return even


def _facts(logprobs: Floats, codes: Codes, scale: int) -> tuple[float, ...]:
    """Cross sum, low logprob, blur, low mass and distance of a row."""
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


# -- as bytes ------------------------------------------------------------------------------------------------


class Packed(NamedTuple):
    """The codes of some rows: how many bits each has, deflated, and those below the first, plane by plane."""

    lengths: bytes
    planes: bytes

    @property
    def num_bytes(self) -> int:
        """Of both."""
        return len(self.lengths) + len(self.planes)


def kept_within(logprobs: npt.ArrayLike, max_bytes: int, first_row: int) -> tuple[KeptRows, Packed]:
    """Keep rows at the finest scale whose codes take at most so many bytes; at the coarsest if none does."""
    rows = np.asarray(logprobs, np.float64)
    for scale in SCALES[_guess(rows, max_bytes) :]:
        codes = drawn_codes(rows, scale, first_row)
        packed = pack(codes)
        if packed.num_bytes <= max_bytes:
            break
    return KeptRows.of(rows, codes, scale), packed


def _guess(rows: Floats, max_bytes: int) -> int:
    """The index of a scale that may be a little too fine, found on some of the rows."""
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
    """Codes as bytes; `unpack` reads them.

    The lengths of two codes are a byte, and few bytes are frequent: Huffman's code, with runs. What a length
    leaves open is noise, and stands as it is.
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
    """The codes, (num_rows, vocabulary_size), of bytes that anybody may have made.

    Raises:
        InputError: they hold more or less than that.
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
        _require(stop <= len(packed.planes), "its codes are cut short")
        bits = np.unpackbits(np.frombuffer(packed.planes, np.uint8, stop - start, start), count=len(places))
        codes[places] |= bits.astype(np.uint16) << bit
        start, bit = stop, bit + 1
        places = places[lengths[places] > bit + 1]
    _require(start == len(packed.planes), "it holds more codes than rows")
    return codes.reshape(num_rows, vocabulary_size)


def _inflated(data: bytes, num_bytes: int) -> bytes:
    """Exactly so many bytes; no more are made, whatever the data says."""
    inflate = zlib.decompressobj()
    try:
        found = inflate.decompress(data, num_bytes + 1)
    except zlib.error as error:
        raise InputError(f"the baseline contradicts itself: its codes cannot be read ({error})") from error
    is_whole = len(found) == num_bytes and inflate.eof and not inflate.unused_data
    _require(is_whole, "its codes are not as many as its rows say")
    return found


def _require(is_so: object, message: str) -> None:
    if not is_so:
        raise InputError(f"the baseline contradicts itself: {message}")
