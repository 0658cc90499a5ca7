"""`LogitLens`: what each layer of a model would predict after each token of a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.records.forms.finite import finite, finite_value

if TYPE_CHECKING:
    import numpy.typing as npt

    from logprobe.engine.request import RequestOutput
    from logprobe.records import FlatLogprobs, LogprobsInfo, TokenTable
    from logprobe.records.forms.picture import Picture


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LogitLens:
    """Predictions of the layers of a model after each token of a text (nostalgebraist 2020).

    A layer's log-probabilities are the log-softmax of the logits that the model's final norm and output head
    compute from the layer's hidden state. The last hidden state is already normalized, so the last layer's
    log-probabilities are the model's own.
    """

    token_ids: list[int]  # (T,) the text
    targets: list[int]  # (T,) the next tokens of the text; after its end, the model's most likely token
    layers: tuple[int, ...]  # (L,) 0: the embeddings; n: the output of layer n
    records: list[FlatLogprobs]  # (L,) of T positions each: the targets, the most likely tokens, the entropy
    table: TokenTable
    info: LogprobsInfo | None

    @classmethod
    def of(cls, output: RequestOutput, layers: tuple[int, ...], table: TokenTable) -> LogitLens:
        """Return the predictions in the output of a request with `Request.lens`."""
        assert output.lens is not None
        for record in output.lens:
            record.info = output.info
        return cls(
            token_ids=output.prompt_token_ids,
            targets=output.lens[0].chosen_entries().token_ids.tolist(),
            layers=layers,
            records=output.lens,
            table=table,
            info=output.info,
        )

    def __repr__(self) -> str:
        return f"<LogitLens: {len(self.token_ids)} tokens, layers {', '.join(map(str, self.layers))}>"

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """(L, T) float32, nats: log-probability of each target in each layer."""
        return np.stack([record.chosen_entries().logprobs for record in self.records]).astype(np.float32)

    @property
    def ranks(self) -> npt.NDArray[np.int64]:
        """(L, T) int64: rank of each target in each layer, from 1."""
        return np.stack([record.chosen_entries().ranks for record in self.records]).astype(np.int64)

    @property
    def entropy(self) -> npt.NDArray[np.float32]:
        """(L, T) float32, nats: entropy of each layer's distribution."""
        return np.stack([record.extras["entropy"] for record in self.records]).astype(np.float32)

    def top(self, layer: int, position: int) -> list[tuple[str, float]]:
        """Return the most likely tokens in a layer after a token of the text, with their logprobs in nats.

        Args:
            layer: one of `layers`.
            position: index of the token in the text; negative indices count from the end.
        """
        record = self.records[self.layers.index(layer)]
        start = range(len(self.token_ids))[position]
        entries = record[start : start + 1].top_entries()
        texts = map(self.table.token_text, entries.token_ids.tolist())
        return list(zip(texts, entries.logprobs.tolist(), strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Return the values as a dict for JSON; infinite numbers are clamped as in other JSON output."""

        def named(token_id: int) -> dict[str, Any]:
            return {"token_id": token_id, "token": self.table.token_text(token_id)}

        def row(index: int, position: int) -> dict[str, Any]:
            top = self.records[index][position : position + 1].top_entries()
            return {
                "layer": self.layers[index],
                "logprob": finite_value(float(logprobs[index, position])),
                "rank": int(ranks[index, position]),
                "entropy": finite_value(float(entropy[index, position])),
                "top_logprobs": [
                    named(token_id) | {"logprob": logprob}
                    for token_id, logprob in zip(top.token_ids.tolist(), finite(top.logprobs), strict=True)
                ],
            }

        logprobs, ranks, entropy = self.logprobs, self.ranks, self.entropy
        return {
            "layers": [*self.layers],
            "tokens": [
                named(token_id)
                | {"target": named(target)}
                | {"predictions": [row(index, position) for index in range(len(self.layers))]}
                for position, (token_id, target) in enumerate(zip(self.token_ids, self.targets, strict=True))
            ],
        }

    def plot(self) -> Picture:
        """Plot each layer's most likely token after each token of the text, shaded by probability.

        Raises:
            MissingPackageError: matplotlib is not installed.
            ParameterError: the records have no most likely tokens.
        """
        from logprobe.records.forms.picture import draw_lens

        tops = [record.top_entries() for record in self.records]
        return draw_lens([*self.layers], self.token_ids, tops, self.table)
