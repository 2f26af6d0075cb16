# pyright: reportPrivateImportUsage=false
"""What both training scripts share: the loop, the pool of training data, and pages of pictures."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

REFRESH = 16  # steps between replacements of a batch in the pool, because encoding a batch takes longer than a step
EMA_DECAY = 0.9995


@dataclass(frozen=True)
class Clock:
    """Measures the share of a stage's time that has passed, compilation included."""

    started: float
    minutes: float

    @staticmethod
    def now(minutes: float) -> "Clock":
        return Clock(time.monotonic(), minutes)

    def done(self) -> float:
        return (time.monotonic() - self.started) / (60 * self.minutes)


def fit(
    name: str,
    loss: Callable[[], Tensor],
    params: list[nn.Parameter],
    *,
    clock: Clock,
    lr: float,
    masters: list[nn.Parameter] | None = None,
) -> Iterator[tuple[int, float]]:
    """Train with AdamW until the time is up, with a learning rate that falls to zero; yields (step, last loss read).

    params: those that the loss is computed with. masters: their values in full precision, which the optimizer changes
    in their place, where they are in half precision.
    """
    trained = params if masters is None else masters
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.99), weight_decay=0.0, fused=params[0].is_cuda)
    step, value, said = 0, math.nan, time.monotonic()
    while (done := clock.done()) < 1:
        rate = lr * min(1.0, (step + 1) / 200) * (0.5 + 0.5 * math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate
        for param in params:
            param.grad = None
        current = loss()
        current.backward()
        for master, param in zip(masters or (), params, strict=masters is not None):
            master.grad = None if param.grad is None else param.grad.float()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if masters is not None:
            torch._foreach_copy_([param.detach() for param in params], [master.detach() for master in masters])
        step += 1
        if step % 20 == 1:
            value = current.item()  # waits for the GPU, so that the clock measures finished steps
            if step == 1 or time.monotonic() - said > 10:
                said = time.monotonic()
                print(f"{name}: {done:4.0%} step {step} loss {value:.4f} lr {rate:.2e}", flush=True)
        yield step, value


def masters_of(params: list[nn.Parameter]) -> list[nn.Parameter]:
    """Return copies of parameters in full precision."""
    return [nn.Parameter(param.detach().float().clone()) for param in params]


def compiled(loss: Callable[..., Tensor], enabled: bool, *trials: tuple[object, ...]) -> Callable[..., Tensor]:
    """Return `torch.compile(loss)` if both passes work here with the arguments of each trial, else `loss` itself."""
    if not enabled:
        return loss
    candidate = torch.compile(loss, dynamic=False)
    try:
        for trial in trials:
            candidate(*trial).backward()
    except RuntimeError as error:  # the base class of all torch.compile errors
        print(f"not compiled: {type(error).__name__}: {str(error)[:300]}")
        return loss
    return candidate


class Average:
    """The moving average of trained weights, in full precision."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.values = [param.detach() for param in params]
        self.averages = [value.clone() for value in self.values]

    def update(self, step: int) -> None:
        torch._foreach_lerp_(self.averages, self.values, 1 - min(EMA_DECAY, (1 + step) / (10 + step)))

    def write(self, params: list[nn.Parameter]) -> None:
        """Write the average into these parameters."""
        torch._foreach_copy_([param.detach() for param in params], self.averages)


class Pool:
    """A pool of training data, batches of equal size that are replaced one at a time."""

    def __init__(self, make: Callable[[], tuple[Tensor, ...]], slots: int) -> None:
        """make: returns the tensors of a new batch, row by row."""
        self.make, self.slots = make, slots
        batches = [make() for _ in range(slots)]
        self.size = len(batches[0][0])
        self.columns = tuple(torch.cat(column) for column in zip(*batches, strict=True))

    def refresh(self, step: int) -> None:
        """Replace the oldest batch at every sixteenth step."""
        if step % REFRESH:
            return
        start = step // REFRESH % self.slots * self.size
        for column, rows in zip(self.columns, self.make(), strict=True):
            column[start : start + self.size] = rows

    def draw(self, count: int, rng: torch.Generator) -> tuple[Tensor, ...]:
        """Return the tensors of `count` random rows."""
        rows = torch.randint(len(self.columns[0]), (count,), device=rng.device, generator=rng)
        return tuple(column[rows] for column in self.columns)


def save_grid(path: Path, images_NHWC: Tensor, columns: int, captions: tuple[str, ...]) -> None:
    """Save pictures in [0, 1] as a grid, in rows of `columns`; groups of equal length share a caption."""
    count, height, width, _ = images_NHWC.shape
    group = count // len(captions)
    page = Image.new("RGB", (columns * (width + 4), -(-count // columns) * (height + 18)), "white")
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(11)
    for i, pixels in enumerate((images_NHWC.clamp(0, 1) * 255).round().byte().cpu().numpy()):
        x, y = i % columns * (width + 4), i // columns * (height + 18)
        page.paste(Image.fromarray(pixels), (x, y))
        if i % group == 0:
            draw.text((x, y + height + 1), captions[i // group], font=font, fill="black")
    page.save(path)
