"""What every sharded call needs: kept exchanges, predictions on this rank's tokens, calls as CUDA graphs."""
