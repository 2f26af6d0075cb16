"""`seqpar serve`: an API server that speaks HTTP, and ranks that run models; they exchange messages over a Unix socket."""
