"""An engine in processes of its own: what stands on either side of the wall, and what crosses it."""
