"""OpenAI's formats: request bodies, conversion to parameters and token ids, schemas of replies."""
