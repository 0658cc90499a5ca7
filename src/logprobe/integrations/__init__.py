"""Plug-ins: what has its own users and needs a package of its own; nothing else imports them.

A door finds one by name: an engine in `config.ENGINES`, a language model in the lazy names of `logprobe`.
"""

from __future__ import annotations
