"""The ranks of a server: they hold the models, take orders from the front by way of rank 0, and make pictures."""
