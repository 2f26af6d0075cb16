"""Where the time of a run goes: traces of all ranks on one clock, and what they add up to."""
