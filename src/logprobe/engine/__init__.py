"""The native engine: front end, scheduler, prefix cache, forward pass, sampling, and execution backends."""
