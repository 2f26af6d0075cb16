"""`seqpar serve` under Ray Serve: several replicas on several machines behind one address (docs/deploy/ray.md)."""

from seqpar.serve.ray.build import app

__all__ = ["app"]
