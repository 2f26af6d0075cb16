"""What `auto` means: costs, measured rates, predictions, the search over layouts."""
