"""Where the entries of a record lie: regular rows packed, ragged ones as they come."""
