"""How attention sees the whole sequence; one strategy = one file exporting `build(mesh, ...)` and `FACTS`."""
