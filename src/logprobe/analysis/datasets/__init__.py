"""Data sets: files of texts, pairs or questions to files of numbers."""
