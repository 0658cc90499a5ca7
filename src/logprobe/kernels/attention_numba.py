"""The compiled form of `attend_rows`."""

from __future__ import annotations

import math

import numba as nb
import numpy as np


@nb.njit(cache=True, nogil=True, fastmath=True)
def attend(query, keys, values, out, queries, begins, lengths, slots, scale, window, softcap):
    groups = query.shape[1] // keys.shape[1]
    longest = 0
    for length in lengths:
        longest = max(longest, length)
    scores = np.empty(longest, dtype=np.float32)
    for item in range(len(queries) * query.shape[1]):
        row, head = item // query.shape[1], item % query.shape[1]
        length = lengths[row]
        start = max(0, length - window)
        context = slots[begins[row] + start : begins[row] + length]
        q = query[queries[row], head]
        kv_head = head // groups
        best = np.float32(-np.inf)
        for j in range(len(context)):
            k = keys[context[j], kv_head]
            score = np.float32(0)
            for d in range(len(k)):
                score += q[d] * k[d]
            score *= scale
            if softcap > 0:
                score = softcap * np.float32(math.tanh(score / softcap))
            scores[j] = score
            best = max(best, score)
        total = np.float32(0)
        for j in range(len(context)):
            scores[j] = np.float32(math.exp(scores[j] - best))
            total += scores[j]
        result = out[queries[row], head]
        result[:] = 0
        for j in range(len(context)):
            weight = scores[j] / total
            v = values[context[j], kv_head]
            for d in range(len(v)):
                result[d] += weight * v[d]
