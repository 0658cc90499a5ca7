"""Audit an endpoint: compare its log-probabilities with exact ones computed here.

`run.audit` works in this order:

1. `session` finds out which requests the server answers, and sends the requests of `forms` via `endpoint`.
2. `rows` matches the rows in the replies with tokens (`tokens`) and with the exact rows (`reference`).
3. `compare` uses `fit` to find out which of the `distributions` the server reports, and adds faults.
4. `steady` repeats requests under other circumstances, `fields` tries each field, and `changes` compares with
   an earlier audit.
5. `report` holds the results.
"""
