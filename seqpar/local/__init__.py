"""One device's attention; one implementation = one file exporting `attend` (a Core) and `why_not`."""
