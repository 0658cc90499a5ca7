"""Many requests → one batch → one step: scheduler, prefix cache, forward pass, and the seams around them."""
