"""`seqpar serve`: an API server that speaks HTTP, and ranks that run models, connected by a Unix socket."""
