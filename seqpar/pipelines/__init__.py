"""From a prompt or labels to pictures; one family of models = one file."""
