"""Moving blocks between the ranks of one axis. An exchange has `outboxes()` to write and `deliver()` to read."""
