"""The fields of a request for a video, and the number of frames that it asks for."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from pydantic import BeforeValidator, Field

from seqpar.serve.front.errors import Problem, ProblemError
from seqpar.serve.front.pictures import InputImages
from seqpar.serve.front.schema import CommonFields
from seqpar.serve.messages import ImageRequest, ServedModel, VideoFacts

MOST_FRAMES = 4096


def _number(value: Any) -> Any:
    """Return the number in a text, as OpenAI's clients send seconds."""
    try:
        return float(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else value
    except (ValueError, OverflowError):
        return value


class VideoRequest(CommonFields):
    """A request for a video."""

    seconds: Annotated[
        float | None,
        BeforeValidator(_number),
        Field(gt=0, le=3600, allow_inf_nan=False, description="Rounded to a number of frames that the model makes."),
    ] = None
    frames: Annotated[int | None, Field(ge=1, le=MOST_FRAMES, description="In place of seconds.")] = None
    fps: Annotated[int | None, Field(ge=1, le=1000, description="Frames a second.")] = None

    def video_order(self, model: ServedModel, inputs: InputImages) -> tuple[ImageRequest, float]:
        """Return the order of a video, and its frames a second; ProblemError for frames that are not made."""
        facts = model.video
        assert facts is not None  # the model was looked for by what it makes
        frames = self._frames(facts)
        order = msgspec.structs.replace(self.order(model, inputs), frames=frames, fps=self.fps)
        return order, float(self.fps or facts.fps)

    def _frames(self, facts: VideoFacts) -> int:
        if self.seconds is None:
            frames = facts.frames if self.frames is None else self.frames
            near = _nearest(frames, facts)
            if near != frames:
                text = f"got frames {frames}, expected {facts.frames % facts.unit} more than a multiple of {facts.unit}"
                raise ProblemError(Problem(400, "invalid_value", f"{text}, as {near}", "frames"))
            return frames
        if self.frames is not None:
            text = f"got seconds {self.seconds:g} and frames {self.frames}, expected one of them"
            raise ProblemError(Problem(400, "invalid_value", text, "seconds"))
        fps = self.fps or facts.fps
        frames = _nearest(round(self.seconds * fps), facts)
        if frames > MOST_FRAMES:
            text = f"got seconds {self.seconds:g} at {fps:g} frames a second, expected at most {MOST_FRAMES} frames"
            raise ProblemError(Problem(400, "invalid_value", f"{text}; ask for a shorter video", "seconds"))
        return frames


def _nearest(frames: int, facts: VideoFacts) -> int:
    """Return the number of frames closest to this one that a model makes."""
    rest = facts.frames % facts.unit
    near = round((frames - rest) / facts.unit) * facts.unit + rest
    return near if near > 0 else near + facts.unit
