"""`RemoteLLM`, next-token distributions from a server of this library; needs httpx."""
