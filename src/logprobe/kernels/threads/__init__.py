"""How compiled workers run: on torch's own threads, many stages in one launch, vector instructions."""
