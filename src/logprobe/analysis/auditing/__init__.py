"""Audit an endpoint: compare its log-probabilities with exact ones computed here.

`run.audit` works in this order:

1. `session` finds out which requests the server answers, and sends the requests of `forms` via `endpoint`.
2. `rows` identifies the tokens in the replies (`tokens`), computes the exact rows, and pairs both.
3. `compare` uses `fit` to find out which distribution the server reports, and records faults.
4. `circumstances` repeats requests under other circumstances; `changes` compares with an earlier audit.
5. `report` holds the results.

`conformance` is a separate check of the server's API, which needs no exact rows.
"""
