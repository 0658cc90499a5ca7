"""Verify, by the digests in stored replies, that the replies were computed with given weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec
import numpy as np

from logprobe.analysis.io.files import read_limited
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
MAX_FILE_BYTES: Final = 1 << 28
BATCH: Final = 64  # choices whose rows are held at a time
UNCHANGED: Final = "pass the whole reply, unchanged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Comparison of one choice's digests with the verifier's own rows."""

    choice: str  # id of the reply and index of the choice
    num_tokens: int
    num_identical: int  # tokens whose digests are identical
    mean_difference: float  # nats, over all sampled log-probabilities
    max_difference: float  # nats
    tolerance: float  # nats
    has_same_version: bool  # True if the reply names the versions of the verifier's weights and LoRA adapter

    @property
    def is_match(self) -> bool:
        """True if the mean difference is within the tolerance."""
        return self.mean_difference <= self.tolerance

    def __str__(self) -> str:
        return (
            f"{self.choice}: {'match' if self.is_match else 'NO MATCH'}, mean difference "
            f"{self.mean_difference:.5f} nats (tolerance {self.tolerance:g}), largest "
            f"{self.max_difference:.5f}, {self.num_identical} of {self.num_tokens} digests identical"
            f"{'' if self.has_same_version else ', other version of the weights or the adapter'}"
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
        InputError: there are no replies, or one has no digests, has no tokens, or is malformed.
        ParameterError: a LoRA adapter that a reply names is not loaded.
        BatchError: a token is outside the model's vocabulary, or a reply is too long for the model.
    """
    require(tolerance >= 0, "tolerance", "must be 0 or more", got=tolerance)
    many = replies if isinstance(replies, list) else [replies]
    claims = [claim for number, reply in enumerate(many) for claim in _claims(reply, number)]
    if not claims:
        raise InputError("replies: there are none; give replies to requests with `digest: true`")
    verified: dict[int, Verification] = {}
    for lora in {claim.info.lora for claim in claims}:  # each adapter's replies are scored together
        numbers = [number for number, claim in enumerate(claims) if claim.info.lora == lora]
        for start in range(0, len(numbers), BATCH):
            batch = numbers[start : start + BATCH]
            results = _verify_batch(llm.with_lora(lora), [claims[number] for number in batch], tolerance)
            verified.update(zip(batch, results, strict=True))
    return [verified[number] for number in range(len(claims))]


def _verify_batch(llm: Scorer, claims: list[_Claim], tolerance: float) -> list[Verification]:
    vocab_size = llm.engine.capabilities().vocab_size
    ids = []
    for claim in claims:
        prompt = np.array(claim.prompt)
        ids.append([digest_ids(prompt, position, vocab_size) for position in range(len(claim.token_ids))])
    scores = llm.score([(claim.prompt, claim.token_ids) for claim in claims], logprob_token_ids=ids)
    verified = []
    for claim, score in zip(claims, scores, strict=True):
        assert score.record is not None, "scores in process have records"
        assert score.record.given is not None, "ids were requested"
        rows = score.record.given.arrays.logprobs.reshape(len(claim.token_ids), -1)
        verified.append(_compared(claim, rows, score.record.info, tolerance))
    return verified


def read_replies(path: Path) -> list[Any]:
    """Read a JSON file with one reply or a list of replies, or a file with one reply per line.

    Raises:
        InputError: the file cannot be read, is not JSON, or is too large.
    """
    data = read_limited(path, MAX_FILE_BYTES, "split it")
    try:
        try:
            whole = msgspec.json.decode(data)
            return whole if isinstance(whole, list) else [whole]
        except msgspec.DecodeError:
            return [msgspec.json.decode(line) for line in data.splitlines() if line.strip()]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}: is neither JSON nor JSON lines: {error}") from error


def _claims(reply: Any, number: int) -> Iterator[_Claim]:
    where = f"reply {number}"
    try:
        read = msgspec.convert(reply, _Reply)
    except (msgspec.ValidationError, RecursionError) as error:
        remedy = "store the whole reply to a request with `digest: true`"
        raise InputError(f"{where}: has no valid digests ({error}); {remedy}") from error
    if not read.choices:
        raise InputError(f"{where}: has no choices; leave it out")
    if [choice.index for choice in read.choices] != [*range(len(read.choices))]:
        raise InputError(f"{where}: lacks choices, or has them in another order; {UNCHANGED}")
    prompt = read.prompt_token_ids
    for choice in read.choices:
        prompt = choice.prompt_token_ids or prompt  # only the first choice of a prompt has its ids
        info = choice.logprobs_info or read.logprobs_info
        if prompt is None or info is None:
            raise InputError(f"{where}: has no prompt_token_ids or no logprobs_info; {UNCHANGED}")
        if not choice.token_ids:
            raise InputError(f"{where}: choice {choice.index} has no tokens to verify; leave the reply out")
        try:
            digests = [bytes.fromhex(text) for text in choice.digests]
        except ValueError as error:
            raise InputError(f"{where}: has a digest that is not hexadecimal; {UNCHANGED}") from error
        if {*map(len, digests)} - {NUM_BYTES} or len(digests) != len(choice.token_ids):
            problem = f"does not have one digest of {NUM_BYTES} bytes for each token"
            raise InputError(f"{where}: {problem}; {UNCHANGED}")
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
        has_same_version=own is not None
        and (own.weight_version, own.lora_version) == (claim.info.weight_version, claim.info.lora_version),
    )
