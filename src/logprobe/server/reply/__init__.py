"""One reply from its requests to its bytes, whole or streamed."""
