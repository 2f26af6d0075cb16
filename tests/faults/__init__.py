"""Faults in running jobs: every process goes in time, with a message, and nothing is left behind."""
