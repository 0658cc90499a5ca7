"""The loops of a decoder layer beside its products: norms, rotary positions, stores, 8-bit weights."""
