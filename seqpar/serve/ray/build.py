"""The application of Ray Serve: replicas, each a `seqpar serve` with GPUs of its own, behind an ingress.

    applications:
      - name: seqpar
        import_path: seqpar.serve.ray:app
        args: {models: [black-forest-labs/FLUX.1-dev], gpus: 4, jobs: /shared/jobs, keys: /shared/keys.txt}

Numbers of replicas and their autoscaling are options of the deployments in the same file, as for any application.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray import serve

from seqpar.serve.ray.ingress import Ingress
from seqpar.serve.ray.replica import RayReplica
from seqpar.serve.ray.router import LoraRouter

MANY = 1000  # calls at once to one replica, whose own queue is what refuses requests
DRAIN_S = 3600.0  # for the jobs of a replica that is to end, as long as the longest deadline
HEALTH_S = 5.0  # between looks at a replica's health
PROGRAM = (sys.executable, "-u", "-m", "seqpar.cli", "serve")


class AppArgs(BaseModel):
    """What the config file says under `args`. Paths are of all nodes alike."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    models: Annotated[tuple[str, ...], Field(min_length=1, description="The models of every replica.")]
    gpus: Annotated[int | None, Field(ge=1, description="GPUs of a replica, all on one node.")] = None
    ranks: Annotated[int | None, Field(ge=1, description="Processes of a replica on CPUs, in place of gpus.")] = None
    jobs: Annotated[str, Field(description="The folder that replicas share, as --jobs.")]
    keys: Annotated[str | None, Field(description="As --keys.")] = None
    loras: Annotated[str | None, Field(description="As --loras.")] = None
    flags: Annotated[tuple[str, ...], Field(description="Further flags of `seqpar serve`.")] = ()
    program: Annotated[tuple[str, ...], Field(description="In place of `seqpar serve`.", min_length=1)] = PROGRAM

    @model_validator(mode="after")
    def _one_kind_of_ranks(self) -> AppArgs:
        if (self.gpus is None) == (self.ranks is None):
            raise ValueError(f"got gpus {self.gpus} and ranks {self.ranks}, expected one of them")
        return self

    @property
    def command(self) -> list[str]:
        """Return the command of a replica."""
        count = ("--ranks", str(self.ranks)) if self.gpus is None else ("--gpus", str(self.gpus))
        files = {"--jobs": self.jobs, "--keys": self.keys, "--loras": self.loras}
        named = [word for flag, path in files.items() if path is not None for word in (flag, path)]
        return [*self.program, *self.models, *count, "--host", "127.0.0.1", "--port", "0", *named, *self.flags]


def app(told: dict[str, Any]) -> serve.Application:
    """Return the application that a config file names as `seqpar.serve.ray:app`. told: what it says under `args`."""
    args = AppArgs.model_validate(told)
    replica = serve.deployment(
        name="Replica",
        ray_actor_options={"num_gpus": args.gpus or 0, "num_cpus": args.ranks or 1},
        max_ongoing_requests=MANY,
        graceful_shutdown_timeout_s=DRAIN_S,
        health_check_period_s=HEALTH_S,
        request_router_config={"request_router_class": LoraRouter},
    )(RayReplica)
    ingress = serve.deployment(name="Ingress", ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=MANY)(Ingress)
    return ingress.bind(replica.bind(args.command), args.loras is not None)
