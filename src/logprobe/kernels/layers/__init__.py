"""The loops of a decoder layer beside its products: norms, rotary positions, stores, published weights."""
