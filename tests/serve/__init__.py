"""Tests of `seqpar serve`."""
