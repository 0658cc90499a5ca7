"""What stands beside a record's positions: entropy, and ids that the caller named.

Before it: a step's arrays. After it: `FlatLogprobs`; neither costs anything until one is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from logprobe.errors import ParameterError
from logprobe.records.store.columns import Column
from logprobe.records.store.rows import Rows

if TYPE_CHECKING:
    import numpy.typing as npt

    from logprobe.records.store.columns import Array
    from logprobe.records.store.entries import Entries


class Side:
    """The columns beside the rows of one record, as many positions as these."""

    __slots__ = ("_entropy", "given", "is_empty")

    def __init__(self, entropy: Array | None = None, given: Rows | None = None) -> None:
        self._entropy = None if entropy is None else Column.of(entropy)  # (T,) float32, nats; NaN: not given
        self.given = given  # the named ids, position by position; None: none so far
        self.is_empty = entropy is None and given is None

    def entropy(self, length: int) -> Array | None:
        """Entropy of the first `length` positions; None where none was given."""
        return None if self._entropy is None else self._entropy.read(0, length)

    def append(self, at: int, num_new: int, entropy: npt.ArrayLike | None, given: Entries | None) -> None:
        """Add what belongs to `num_new` positions from `at` on; None: nothing was given for them.

        Raises:
            ParameterError: another number of values than of positions. Nothing is added then.
        """
        values = None if entropy is None else np.asarray(entropy, np.float32)
        if values is not None and values.shape != (num_new,):
            raise ParameterError("entropy", f"{values.shape} values for {num_new} positions")
        if given is not None and len(given.offsets) != num_new + 1:
            raise ParameterError("given", f"{len(given.offsets)} offsets for {num_new} positions; give n + 1")
        self.is_empty = self.is_empty and values is None and given is None
        if values is not None or self._entropy is not None:
            column = self._entropy or Column.of(np.full(at, np.nan, np.float32))
            column.write(at, np.full(num_new, np.nan, np.float32) if values is None else values)
            self._entropy = column
        if given is not None or self.given is not None:
            named = self.given or Rows()
            named.append_none(at + (num_new if given is None else 0) - named.num_rows)
            if given is not None:
                named.append_entries(given)
            self.given = named

    def cut(self, places: range, length: int) -> Side:
        """What belongs to the positions named, of the `length` that there are."""
        entropy = self.entropy(length)
        picked = None if entropy is None else entropy[np.array(places, np.intp)]
        return Side(picked, None if self.given is None else self.given.cut(places))
