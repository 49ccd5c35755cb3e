"""Pictures drawn by procedure, for studies of vision models on machines without a data set: a figure of eight, filled
or as an outline, in any place, size and angle, on a ground that changes its colour from one side to the other, under
noise. Figure and filling are the class."""

import torch
from torch import Tensor

CLASSES = 16
NOISE = 0.3


def draw(count: int, channels: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return pictures [count, channels, size, size], about in [-1, 1], and their classes [count]."""
    device = generator.device

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(count, *shape, 1, 1, generator=generator, device=device) * (high - low) + low

    kinds = torch.randint(CLASSES, (count,), generator=generator, device=device)
    line = torch.linspace(-1, 1, size, device=device)
    down, across = torch.meshgrid(line, line, indexing="ij")
    x, y, angle, scale = across - uniform(-0.4, 0.4), down - uniform(-0.4, 0.4), uniform(0, 6.28), uniform(0.25, 0.5)
    turned = (x * angle.cos() - y * angle.sin()) / scale, (x * angle.sin() + y * angle.cos()) / scale
    distance = _distances(*turned, kinds % 8)  # [count, size, size]
    outlined = (kinds >= 8)[:, None, None]
    inside = torch.sigmoid(-20 * torch.where(outlined, distance.abs() - 0.15, distance))[:, None]
    ground = uniform(-1, 1, channels) + uniform(-0.5, 0.5, channels) * across
    pictures = torch.lerp(ground, uniform(-1, 1, channels), inside)
    return pictures + NOISE * torch.randn(pictures.shape, generator=generator, device=device), kinds


def _distances(x: Tensor, y: Tensor, kinds: Tensor) -> Tensor:
    """Return how far points are outside of the figure of each picture, negative inside; not in exact lengths."""
    a, b = x.abs(), y.abs()
    every = (
        torch.hypot(x, y) - 1,  # disc
        torch.maximum(a, b) - 0.85,  # square
        a + b - 1.2,  # diamond
        torch.maximum(0.866 * a + 0.5 * y, -y) - 0.6,  # triangle
        torch.minimum(torch.maximum(a - 1, b - 0.3), torch.maximum(a - 0.3, b - 1)),  # cross
        torch.maximum(a - 1.2, b - 0.35),  # bar
        torch.hypot(x, 2 * y) - 1.1,  # ellipse
        torch.maximum(0.866 * a + 0.5 * b, b) - 0.9,  # hexagon
    )
    return torch.stack(every, 1)[torch.arange(len(kinds), device=kinds.device), kinds]
