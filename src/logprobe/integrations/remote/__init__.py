"""A server of this project as an engine, and `RemoteLM` on it; needs httpx."""
