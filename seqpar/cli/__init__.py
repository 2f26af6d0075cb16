"""The command line: the `seqpar` command, which `launch/sample.py` shares."""
