"""Optional integrations with other packages; the rest of this library does not import these modules.

They are loaded by name: engines from `config.ENGINES`, language models from the lazy names in
`logprobe`.
"""

from __future__ import annotations
