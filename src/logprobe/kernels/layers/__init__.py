"""CPU kernels of a decoder layer: matrix products, norms, rotary embedding, KV cache stores.

`forms` (or `models.gguf.blocks`) packs weights into the panels that `layout` defines; `panels` multiplies by
them.
"""
