"""Other people's interfaces on this library's public one; each module needs the package it is named after."""

from __future__ import annotations
