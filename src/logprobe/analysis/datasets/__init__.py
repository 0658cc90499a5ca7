"""Score data sets: files of texts, pairs or questions in, files of log-probabilities and measures out."""
