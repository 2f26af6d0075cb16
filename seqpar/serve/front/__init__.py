"""The HTTP front of `seqpar serve`: one process that queues requests and never loads torch or a model."""
