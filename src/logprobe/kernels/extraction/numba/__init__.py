"""The compiled loops of the extraction."""
