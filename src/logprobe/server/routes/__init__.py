"""One handler a route."""
