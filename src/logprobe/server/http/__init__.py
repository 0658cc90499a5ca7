"""HTTP layer shared by all routes: endpoint wrapper, bodies, replies, errors and worker threads."""
