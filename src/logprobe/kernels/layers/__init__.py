"""The loops of a decoder layer: products, norms, rotary positions, stores.

The way of its weights: `gguf_blocks` or `forms` bring them into panels, as `layout` states →
`panels` multiplies by them.
"""
