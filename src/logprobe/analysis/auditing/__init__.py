"""Audit an endpoint: compare its log-probabilities with exact ones computed here.

Order of `run.audit`: `session` finds what the server answers, and sends the requests of `forms` through
`endpoint` → `rows` matches the rows of replies with tokens (`tokens`) and with the exact rows (`reference`) →
`compare` has `fit` find which of the `distributions` each ask's numbers are of, and add faults → `steady`
repeats requests under other circumstances, `fields` tries each field, and `changes` compares with an earlier
audit → `report`.
"""
