"""What runs between matrix products; one kernel = one file, with its plain-torch reference."""
