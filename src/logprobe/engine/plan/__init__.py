"""Which tokens run in the next step, in whose slots."""
