"""`seqpar serve`: a front that speaks HTTP, and ranks that make pictures; they exchange messages over a Unix socket."""
