"""Whether an endpoint tells the truth: its log-probabilities beside the same rows computed exactly.

Its way (`run`): `session` asks, by the forms of `dialects` → `rows` finds the token of each number → `truth`
computes the rows, and `distributions` what they may be after → `fit` says of which they are and what is wrong
→ `steady` asks again, `fields` tries each parameter → `findings` → `report`.
"""
