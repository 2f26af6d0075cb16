"""Attention on one device. Each implementation is one file that exports `attend` (a Core), `why_not`, `invariant` and
`preference`; "auto" chooses the one with the highest preference among those that work."""
