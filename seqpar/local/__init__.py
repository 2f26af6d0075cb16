"""One device's attention; one implementation = one file exporting `attend` (a Core), `why_not`,
`invariant` and `preference`, by which "auto" takes the highest number among those that work."""
