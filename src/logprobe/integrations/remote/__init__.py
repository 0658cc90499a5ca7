"""A server of this project as an engine."""
