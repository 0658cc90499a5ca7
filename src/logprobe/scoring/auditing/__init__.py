"""Whether an endpoint tells the truth: its log-probabilities beside the same rows computed exactly."""
