"""A model's whole next-token rows in a file of bounded size, and other models compared with them."""
