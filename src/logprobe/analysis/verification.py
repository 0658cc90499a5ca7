"""Verify that stored replies were computed with given weights, by their row digests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec
import numpy as np

from logprobe.errors import InputError, require
from logprobe.records.digests import NUM_BYTES, STEP, codes_of, digest_ids, read_digests
from logprobe.records.info import LogprobsInfo  # noqa: TC001 - msgspec reads the annotation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from logprobe.analysis.scorer import Scorer
    from logprobe.records.store.columns import Array

TOLERANCE: Final = 0.001
"""Mean difference in nats up to which a reply matches; see docs/audit.md for how it was chosen."""
MAX_FILE_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Comparison of one choice's digests with the verifier's own rows."""

    choice: str  # id of the reply and index of the choice
    num_tokens: int
    num_identical: int  # tokens whose digests are identical
    mean_difference: float  # nats, over all sampled log-probabilities; NaN without tokens
    max_difference: float  # nats
    tolerance: float  # nats
    has_same_version: bool  # the reply states the version of the verifier's weights

    @property
    def is_match(self) -> bool:
        """True if the mean difference is within the tolerance, or there are no tokens."""
        return not self.mean_difference > self.tolerance

    def __str__(self) -> str:
        return (
            f"{self.choice}: {'match' if self.is_match else 'NO MATCH'}, mean difference "
            f"{self.mean_difference:.5f} nats (tolerance {self.tolerance:g}), largest "
            f"{self.max_difference:.5f}, {self.num_identical} of {self.num_tokens} digests identical"
            f"{'' if self.has_same_version else ', other weight version'}"
        )


TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _Choice(msgspec.Struct):
    index: int
    token_ids: list[TokenId]
    digests: list[str]
    prompt_token_ids: list[TokenId] | None = None
    logprobs_info: LogprobsInfo | None = None


class _Reply(msgspec.Struct):
    """The fields of a reply of `/v1/completions` or `/v1/chat/completions` that verification needs."""

    choices: list[_Choice]
    id: str = ""
    prompt_token_ids: list[TokenId] | None = None
    logprobs_info: LogprobsInfo | None = None


@dataclass(frozen=True, slots=True)
class _Claim:
    """The claims of one choice of a reply: tokens, their digests, and how they were computed."""

    name: str
    prompt: list[int]
    token_ids: list[int]
    digests: list[bytes]
    info: LogprobsInfo


def verify(llm: Scorer, replies: Any, *, tolerance: float = TOLERANCE) -> list[Verification]:
    """Compute the rows of replies again, and compare them with the replies' digests.

    Args:
        llm: a model with the weights that the replies claim.
        replies: a reply of `/v1/completions` or `/v1/chat/completions` with `digest: true`, as a dict, or a
            list of these.
        tolerance: mean difference in nats up to which a reply matches.

    Returns:
        One verification per choice.

    Raises:
        InputError: a reply has no digests, or is malformed.
        ParameterError: a token is outside the model's vocabulary, or a reply is too long for the model.
    """
    require(tolerance >= 0, "tolerance", "must be 0 or more", got=tolerance)
    many = replies if isinstance(replies, list) else [replies]
    claims = [claim for number, reply in enumerate(many) for claim in _claims(reply, number)]
    vocab_size = llm.engine.capabilities().vocab_size
    ids = [
        [digest_ids(np.array(claim.prompt), place, vocab_size) for place in range(len(claim.token_ids))]
        for claim in claims
    ]
    loras = {claim.info.lora for claim in claims}
    found: dict[int, Verification] = {}
    for lora in loras:  # each adapter's replies are scored together
        numbers = [
            number for number, claim in enumerate(claims) if claim.info.lora == lora and claim.token_ids
        ]
        pairs = [(claims[number].prompt, claims[number].token_ids) for number in numbers]
        scores = llm.with_lora(lora).score(pairs, logprob_token_ids=[ids[number] for number in numbers])
        for number, score in zip(numbers, scores, strict=True):
            assert score.record is not None, "scores in process have records"
            assert score.record.given is not None, "ids were requested"
            entries = score.record.given.arrays
            rows = entries.logprobs.reshape(len(claims[number].token_ids), -1)
            found[number] = _compared(claims[number], rows, score.record.info, tolerance)
    return [found.get(number) or _empty(claim, tolerance) for number, claim in enumerate(claims)]


def read_replies(path: Path) -> list[Any]:
    """Read a JSON file with one reply, or a file with one reply per line.

    Raises:
        InputError: the file is not JSON, or is too large.
    """
    if path.stat().st_size > MAX_FILE_BYTES:
        raise InputError(f"{path}: has more than {MAX_FILE_BYTES} bytes; split it")
    data = path.read_bytes()
    try:
        try:
            return [msgspec.json.decode(data)]
        except msgspec.DecodeError:
            return [msgspec.json.decode(line) for line in data.splitlines() if line.strip()]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}: is neither JSON nor JSON lines: {error}") from error


def _claims(reply: Any, number: int) -> Iterator[_Claim]:
    where = f"reply {number}"
    try:
        read = msgspec.convert(reply, _Reply)
    except (msgspec.ValidationError, RecursionError) as error:
        message = f"{where}: has no digests ({error}); request it with `digest: true`, not streamed"
        raise InputError(message) from error
    prompt, info = read.prompt_token_ids, read.logprobs_info
    for choice in read.choices:
        prompt = choice.prompt_token_ids or prompt
        info = choice.logprobs_info or info
        if prompt is None or info is None:
            raise InputError(f"{where}: has no prompt_token_ids or no logprobs_info")
        try:
            digests = [bytes.fromhex(text) for text in choice.digests]
        except ValueError as error:
            raise InputError(f"{where}: has a digest that is not hexadecimal") from error
        if {*map(len, digests)} - {NUM_BYTES} or len(digests) != len(choice.token_ids):
            raise InputError(f"{where}: does not have one digest of {NUM_BYTES} bytes for each token")
        yield _Claim(f"{read.id or number} choice {choice.index}", prompt, choice.token_ids, digests, info)


def _compared(claim: _Claim, rows: Array, own: LogprobsInfo | None, tolerance: float) -> Verification:
    theirs, ours = read_digests(claim.digests, claim.info).astype(np.int64), codes_of(rows).astype(np.int64)
    differences = np.abs(theirs - ours)
    return Verification(
        choice=claim.name,
        num_tokens=len(ours),
        num_identical=int((differences == 0).all(axis=1).sum()),
        mean_difference=float(differences.mean() * STEP),
        max_difference=float(differences.max() * STEP),
        tolerance=tolerance,
        has_same_version=own is not None and own.weight_version == claim.info.weight_version,
    )


def _empty(claim: _Claim, tolerance: float) -> Verification:
    return Verification(
        choice=claim.name,
        num_tokens=0,
        num_identical=0,
        mean_difference=float("nan"),
        max_difference=float("nan"),
        tolerance=tolerance,
        has_same_version=False,
    )
