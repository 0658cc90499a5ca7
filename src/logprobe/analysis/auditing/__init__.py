"""Audit of an endpoint: its log-probabilities beside the same rows computed exactly.

The order of `run`: `session` sends the requests of `forms` by `endpoint` → `rows` matches rows with tokens →
`reference` computes the exact rows, and `distributions` what they may be reported as → `fit` finds which they
are, and their faults → `steady` repeats requests under other circumstances, `fields` tries each field, and
`changes` compares with an earlier audit → `findings` → `report`.
"""
