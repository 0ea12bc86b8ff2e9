"""What every handler works with."""

import random
from dataclasses import dataclass, field

from aiohttp import web

from aioengine.api.errors import ApiError
from aioengine.config import EngineConfig
from aioengine.frontend.front_end import FrontEnd, UnavailableError
from aioengine.frontend.records import Generation
from aioengine.frontend.text import ServedModel, TextPool
from aioengine.frontend.tracer import Tracer
from aioengine.layout import ParallelLayout


@dataclass(slots=True)
class Api:
    """The front end and the served model; `model` is None until it has been read."""

    config: EngineConfig
    layout: ParallelLayout
    front_end: FrontEnd
    tracer: Tracer
    text: TextPool
    started_at: int
    """Unix time, seconds."""
    model: ServedModel | None = None
    seeds: random.Random = field(default_factory=random.Random)
    """Seeds for requests that bring none."""
    unknown_fields: set[str] = field(default_factory=set)
    """Names that were logged already."""

    def served(self) -> ServedModel:
        """The model, while the engine takes work. Raises ApiError 503 otherwise."""
        front_end = self.front_end
        health = front_end.health
        if self.model is None or health == "starting":
            raise ApiError(503, "the server is starting", code="starting")
        if health in ("draining", "failed"):
            reason = front_end.drain_cause or "; ".join(front_end.causes) or "draining"
            raise ApiError(503, reason, code=health, retry_after_s=front_end.retry_after_s)
        return self.model

    def check_room(self, num_choices: int = 1) -> None:
        """Raises ApiError 503 when so many more would be too many."""
        try:
            self.front_end.check_admission(num_choices)
        except UnavailableError as error:
            raise ApiError(
                503, str(error), code=error.code, retry_after_s=error.retry_after_s
            ) from None

    def served_as(self, name: str | None) -> ServedModel:
        """The model under the name that a body asks for (None: whichever there is)."""
        model = self.served()
        if name is not None and name != model.name:
            raise ApiError(
                404,
                f"the model {name[:64]!r} does not exist; this server has {model.name!r}",
                param="model",
                code="model_not_found",
            )
        return model


API = web.AppKey("api", Api)
GENERATION = web.RequestKey("generation", Generation)
"""What a request has asked for, once that is known."""
