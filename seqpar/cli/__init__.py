"""What `launch/sample.py` and the `seqpar` command share: flags, planning, progress, exits."""
