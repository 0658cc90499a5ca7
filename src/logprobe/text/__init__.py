"""Where text meets ids: prompts in, a text that grows, conversations."""
