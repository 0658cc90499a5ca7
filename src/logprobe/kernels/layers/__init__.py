"""The loops of a decoder layer: products, norms, rotary positions, stores.

The way of its weights: `forms` (or `models.gguf.blocks`) brings them into panels, as `layout` states →
`panels` multiplies by them.
"""
