"""What HTTP requests are answered from: the parts of the server, the loaded models, and limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from seqpar.serve.api.codec import Codec
from seqpar.serve.api.command import ServeArgs
from seqpar.serve.api.errors import ProblemError, refused
from seqpar.serve.api.files import JobFolder
from seqpar.serve.api.jobs import Queue
from seqpar.serve.api.keys import KeyTerms
from seqpar.serve.api.replica import Replica
from seqpar.serve.api.telemetry import Metrics
from seqpar.serve.messages import Ready, ServedModel


@dataclass(frozen=True)
class ApiServer:
    """The parts of a server. name: prefix of its jobs' ids. started: Unix seconds. terms: of a key.

    named: each name of a model in requests -> its first one, by which the ranks know it.
    """

    args: ServeArgs
    name: str
    queue: Queue
    replica: Replica
    files: JobFolder
    codec: Codec
    metrics: Metrics
    started: int
    terms: Callable[[str], KeyTerms]
    named: Mapping[str, str]

    @property
    def keeps_records(self) -> bool:
        """Whether `files` is a folder that other servers mount, with records of ended jobs."""
        return self.args.jobs is not None

    @property
    def facts(self) -> Ready:
        """The loaded models and their ranks; ProblemError while they load."""
        if self.replica.facts is None:
            raise not_ready()
        return self.replica.facts

    @property
    def models(self) -> list[ServedModel]:
        """The models that requests may name now; others are for keys with admin=true."""
        return [model for model in self.facts.models if model.loaded or self.args.swap]


async def _server(request: Request) -> ApiServer:
    return request.app.state.server


async def _key(request: Request) -> str:
    return request.state.key


Server = Annotated[ApiServer, Depends(_server)]
Key = Annotated[str, Depends(_key)]


def not_ready() -> ProblemError:
    """The error while the ranks load."""
    return refused(503, "not_ready", "the models are loading; retry later", retry_after="5")
