"""The compiled loops of a decoder layer."""
