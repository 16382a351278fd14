"""What the demo is taught to see: handwritten digits and drawn shapes, as pictures of every size.

Owns: Scene, its facts, and how one is drawn; which digits are held out.
Must not know: questions, encoders.
Invariant: a drawing is a function of its Scene and its random stream; the held-out digits come from `held_out_digits`
and nowhere else.

The digits are those that scikit-learn carries (8x8 pixels, 17 grays; E. Alpaydin and C. Kaynak, UCI Machine Learning
Repository, CC BY 4.0). They are in the order of their writers, so most of the held-out ones have writers of their own.
"""

import math
import random
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image, ImageDraw
from sklearn.datasets import load_digits

NUM_TRAINING_DIGITS = 1500
COLOURS = {  # hues in degrees, None for a gray
    "red": (-8, 8),
    "orange": (24, 35),
    "yellow": (50, 60),
    "green": (95, 145),
    "blue": (212, 240),
    "purple": (272, 294),
    "black": None,
    "white": None,
}
SHAPES = ("circle", "square", "triangle", "star", "cross")
COUNTS = (1, 2, 3, 4)
PLACES = {  # of the middle of a shape, in widths and heights of the picture
    "top left": (0.25, 0.25),
    "top right": (0.75, 0.25),
    "bottom left": (0.25, 0.75),
    "bottom right": (0.75, 0.75),
    "middle": (0.5, 0.5),
}
RESAMPLINGS = tuple(Image.Resampling)
CANVAS = 128  # pixels of a side, for shapes
Rgb = tuple[int, int, int]


@dataclass(frozen=True)
class Scene:
    """What a picture shows: a digit, or `count` equal shapes; one that is alone has a place."""

    digit: int | None = None
    colour: str = ""
    shape: str = ""
    count: int = 0
    place: str | None = None


@dataclass(frozen=True)
class Picture:
    """A scene and one image of it."""

    scene: Scene
    image: Image.Image


@cache
def _digits() -> tuple["np.ndarray", "np.ndarray"]:
    """Inks [N, 8, 8] from 0 to 1, and what they are."""
    bunch = load_digits()
    return bunch.images.astype(np.float32) / 16.0, bunch.target


def training_digits() -> list[tuple["np.ndarray", int]]:
    """(ink [8, 8], digit) of each digit that may be learned from."""
    inks, digits = _digits()
    return [(ink, int(digit)) for ink, digit in zip(inks[:NUM_TRAINING_DIGITS], digits, strict=False)]


def held_out_digits() -> list[tuple["np.ndarray", int]]:
    """(ink [8, 8], digit) of each of the other 297."""
    inks, digits = _digits()
    return [
        (ink, int(digit)) for ink, digit in zip(inks[NUM_TRAINING_DIGITS:], digits[NUM_TRAINING_DIGITS:], strict=True)
    ]


def picture_of_digit(ink: "np.ndarray", digit: int, draw: random.Random, size: int, bend: bool = False) -> Picture:
    """A digit, `size` pixels square, on a light or dark ground; `bend` it as another hand might have written it."""
    image = Image.fromarray(np.uint8(ink * 255 + 0.5))
    if bend:
        image = _bent(image, draw)
    if image.width != size:
        image = image.resize((size, size), draw.choice(RESAMPLINGS))
    share = np.asarray(image, np.float32)[..., None] / 255
    ground, pen = _grays(draw) if draw.random() < 0.6 else _tints(draw)
    rgb = np.array(ground, np.float32) * (1 - share) + np.array(pen, np.float32) * share
    return Picture(Scene(digit=digit), Image.fromarray(np.uint8(np.clip(rgb + 0.5, 0, 255))))


def _bent(image: Image.Image, draw: random.Random) -> Image.Image:
    """Turned, slanted, stretched and moved a little, at 32 pixels; sometimes with a thinner or a bolder pen."""
    side = 32
    turn, slant = math.radians(draw.gauss(0, 7)), draw.gauss(0, 0.12)
    wide, high = (math.exp(draw.gauss(-0.02, 0.1)) for _ in range(2))
    cos, sin = math.cos(turn), math.sin(turn)
    # From the new picture to the old: rows of the inverse map, in old pixels per new pixel.
    a, b = cos / wide, (sin + slant) / wide
    c, d = -sin / high, cos / high
    middle, scale = side / 2, image.width / side
    dx, dy = draw.gauss(0, 1.3), draw.gauss(0, 1.3)
    matrix = (
        a * scale,
        b * scale,
        (middle - a * (middle + dx) - b * (middle + dy)) * scale,
        c * scale,
        d * scale,
        (middle - c * (middle + dx) - d * (middle + dy)) * scale,
    )
    bent = image.transform((side, side), Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC)
    power = math.exp(draw.gauss(0, 0.25))
    return bent.point([round(255 * (value / 255) ** power) for value in range(256)])


def _grays(draw: random.Random) -> tuple[Rgb, Rgb]:
    """A ground and a pen: dark on light, or light on dark."""
    light, dark = draw.randint(190, 255), draw.randint(0, 60)
    grays = (light,) * 3, (dark,) * 3
    return grays if draw.random() < 0.5 else (grays[1], grays[0])


def _tints(draw: random.Random) -> tuple[Rgb, Rgb]:
    """The same with colours of any hue."""

    def tint(low: int, high: int) -> Rgb:
        return draw.randint(low, high), draw.randint(low, high), draw.randint(low, high)

    tints = tint(175, 255), tint(0, 90)
    return tints if draw.random() < 0.5 else (tints[1], tints[0])


def any_shapes(draw: random.Random) -> Scene:
    """A random scene of shapes; one alone more often than each other count, as only then there is a place to learn."""
    count = draw.choice((1, 1, *COUNTS))
    place = draw.choice(tuple(PLACES)) if count == 1 else None
    return Scene(colour=draw.choice(tuple(COLOURS)), shape=draw.choice(SHAPES), count=count, place=place)


def picture_of_shapes(scene: Scene, draw: random.Random, size: int) -> Picture:
    """The scene, `size` pixels square, on a light or dark ground that the shapes stand out from."""
    is_dark = {"black": False, "white": True}.get(scene.colour, draw.random() < 0.5)
    low, high = (0, 45) if is_dark else (215, 255)
    gray = draw.randint(low, high)
    ground = tuple(min(high, max(low, gray + draw.randint(-8, 8))) for _ in range(3))
    image = Image.new("RGB", (CANVAS, CANVAS), ground)
    canvas, pen = ImageDraw.Draw(image), _pen(scene.colour, draw)
    for x, y, radius in _spots(scene, draw):
        _put(canvas, scene.shape, x, y, radius, pen)
    return Picture(scene, image.resize((size, size), draw.choice(RESAMPLINGS)))


def _pen(colour: str, draw: random.Random) -> Rgb:
    hues = COLOURS[colour]
    if hues is None:
        low, high = (0, 30) if colour == "black" else (228, 255)
        return (draw.randint(low, high),) * 3
    hue = draw.uniform(*hues) % 360
    saturation = draw.uniform(0.85, 1.0)
    value = draw.uniform(0.9, 1.0) if colour in ("orange", "yellow") else draw.uniform(0.7, 1.0)
    part = hue / 60

    def channel(offset: int) -> int:
        k = (offset + part) % 6
        return round(255 * value * (1 - saturation * max(0.0, min(k, 4 - k, 1.0))))

    return channel(5), channel(3), channel(1)


def _spots(scene: Scene, draw: random.Random) -> list[tuple[float, float, float]]:
    """(x, y, radius) of each shape in pixels of the canvas; no two touch, none leaves it."""
    if scene.place is not None:
        x, y = (CANVAS * (share + draw.uniform(-0.05, 0.05)) for share in PLACES[scene.place])
        most = 0.36 if scene.place == "middle" else 0.19
        return [(x, y, CANVAS * draw.uniform(0.13, most))]
    radius = CANVAS * draw.uniform(0.12, 0.17)
    spots: list[tuple[float, float, float]] = []
    while len(spots) < scene.count:
        x, y = (draw.uniform(radius, CANVAS - radius) for _ in range(2))
        if all(max(abs(x - other[0]), abs(y - other[1])) > 2.2 * radius for other in spots):
            spots.append((x, y, radius))
        elif draw.random() < 0.02:
            spots.clear()  # placed so badly that no more fit
    return spots


def _put(canvas: ImageDraw.ImageDraw, shape: str, x: float, y: float, radius: float, pen: Rgb) -> None:
    if shape == "circle":
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=pen)
    elif shape == "square":
        half = 0.85 * radius
        canvas.rectangle((x - half, y - half, x + half, y + half), fill=pen)
    elif shape == "cross":
        thin = 0.3 * radius
        canvas.rectangle((x - radius, y - thin, x + radius, y + thin), fill=pen)
        canvas.rectangle((x - thin, y - radius, x + thin, y + radius), fill=pen)
    else:
        corners, inner = (3, 1.0) if shape == "triangle" else (10, 0.42)
        angles = [math.tau * (index / corners - 0.25) for index in range(corners)]
        reach = [radius * (inner if index % 2 and shape == "star" else 1.0) for index in range(corners)]
        canvas.polygon(
            [(x + r * math.cos(a), y + r * math.sin(a)) for a, r in zip(angles, reach, strict=True)], fill=pen
        )


def any_size(draw: random.Random, smallest: int, largest: int = 512) -> int:
    """A side in pixels; as often between 8 and 16 as between 256 and 512."""
    return round(math.exp(draw.uniform(math.log(smallest), math.log(largest))))
