"""Plain models and other engines' ways, which benches and tests compare with."""
