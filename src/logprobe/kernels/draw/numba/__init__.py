"""The compiled loops of the draw."""
