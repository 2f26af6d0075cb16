"""The ranks of a server: they hold the models and run requests, which rank 0 gets from the API server."""
