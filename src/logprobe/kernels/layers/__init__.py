"""CPU kernels of a decoder layer: matrix products, norms, rotary embedding, activations.

`layout` defines how weights are packed into panels, `forms` (or `models.gguf.blocks`) packs them, and
`panels` computes products with them. `rows` has all other kernels.
"""
