"""The compiled loops of attention."""
