"""Text handling: tokenization, incremental decoding of completions, chat templates."""
