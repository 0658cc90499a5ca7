"""What every route shares of HTTP: guard, bodies, replies, errors, and the threads beside the event loop."""
