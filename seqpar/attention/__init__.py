"""How attention sees the whole sequence; one strategy = one file exporting `check(mesh)` and `build(mesh, ...)`."""
