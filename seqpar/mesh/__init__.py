"""Process groups and the watchdog over their ranks, shards, rank 0's inputs, cancellation points, exact mode."""
