"""Process groups and the watch over their ranks, the tokens of each rank, rank 0's inputs, exact mode."""
