"""Strategies: how attention sees the whole sequence. Each strategy is one file that exports `build` and `FACTS`."""
