"""The API server of `seqpar serve`: HTTP, the queue, keys and files. It starts the ranks, and imports no torch."""
