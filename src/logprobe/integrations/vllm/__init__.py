"""vLLM as an engine: vLLM schedules and runs the model, this library samples and computes log-probabilities.

A logits processor in vLLM's workers (`worker`) samples the tokens of our requests and stores the results; the
front end (`engine`) fetches them with `collective_rpc`. `internals.py` lists the undocumented attributes of
vLLM that `existing` uses.
"""

from __future__ import annotations
