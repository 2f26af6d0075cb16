"""What the rooms of the package exchange: data types that import no room."""
