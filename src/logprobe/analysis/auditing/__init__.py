"""Audit of an endpoint: its log-probabilities beside the same rows computed exactly.

The order of `run`: `session` asks, by the forms of `dialects` → `rows` finds the token of each number →
`reference` computes the rows, and `distributions` what they may be after → `fit` says of which they are and
which faults they have → `steady` asks again, `fields` tries each parameter → `findings` → `report`.
"""
