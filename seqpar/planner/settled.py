"""The mesh on which a plan runs."""

from __future__ import annotations

from seqpar.mesh.mesh import Mesh
from seqpar.planner.plan import Plan


def settled(plan: Plan, mesh: Mesh | None) -> Mesh:
    """Return the caller's mesh, or that of the plan; `ValueError` on every rank if they do not fit together."""
    joined = mesh or Mesh.from_env(*plan.sizes.values())
    joined.together(lambda: plan.check(joined))
    return joined
