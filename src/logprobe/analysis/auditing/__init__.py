"""Audit an endpoint: compare its log-probabilities with exact ones computed here.

Order of `run`: `session` sends the requests of `forms` through `endpoint` → `rows` matches rows with tokens →
`reference` computes the exact rows, and `distributions` the forms they may be reported in → `fit` finds the
reported one, and faults → `steady` repeats requests under other circumstances, `fields` tries each field, and
`changes` compares with an earlier audit → `findings` → `report`.
"""
