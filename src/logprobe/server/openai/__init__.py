"""OpenAI's shapes: bodies, their fields as parameters, replies and their schemas."""
