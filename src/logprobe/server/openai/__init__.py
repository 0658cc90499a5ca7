"""OpenAI's shapes: bodies, their fields as parameters, their prompts as ids, schemas of the replies."""
