"""What `launch/bench.py` runs."""
