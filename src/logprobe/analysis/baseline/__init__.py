"""Save a model's full next-token distributions in a file of bounded size, and compare models with them."""
