"""What every route shares of HTTP: guard, bodies, events, errors."""
