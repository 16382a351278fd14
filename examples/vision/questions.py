"""What is asked about a picture, in many wordings, and what is answered.

Owns: the questions, the answers, and which wordings are held out.
Must not know: pixels, models.
"""

import random
from dataclasses import dataclass

from scenes import Scene

ASKED: dict[str, tuple[str, ...]] = {
    "digit": (
        "What digit is this?",
        "Which number do you see?",
        "Which digit is shown in the image?",
        "What number is written here?",
        "Read the digit.",
        "Read the number in this picture, please.",
        "What is the number?",
        "Can you tell me which digit this is?",
        "Which handwritten digit does the picture show?",
        "What does it say?",
        "Which digit from 0 to 9 is it?",
        "Recognize the handwritten digit.",
        "Please tell me the number.",
        "Hello! I wrote down a digit. Which one?",
    ),
    "colour": (
        "What colour is the shape?",
        "What color is it?",
        "Which colour do you see?",
        "Which color does the shape have?",
        "Name the colour.",
        "Tell me the color of the object in this image.",
        "What is the colour of the {shape}?",
        "What color is the {shape}?",
        "In which color is the shape drawn?",
        "The shape in the picture: what color is it?",
        "Please tell me which colour this is.",
        "Which colour are the shapes?",
    ),
    "shape": (
        "What shape is this?",
        "Which shape do you see?",
        "Name the shape.",
        "What kind of shape is in the image?",
        "Which shape is drawn here?",
        "What is the shape?",
        "Tell me the shape of the object in this picture.",
        "What geometric figure is it?",
        "What shape is the {colour} object?",
        "Please tell me which shape this is.",
        "Which figure does the image show?",
        "What is this {colour} thing?",
    ),
    "count": (
        "How many shapes are there?",
        "How many {shapes} do you see?",
        "Count the shapes.",
        "How many objects are in the image?",
        "What is the number of shapes?",
        "How many of them are there in the picture?",
        "Count the objects in this picture, please.",
        "How many {colour} shapes can you see?",
        "Tell me how many shapes there are.",
        "How many {shapes} are in the image?",
    ),
    "place": (
        "Where is the shape?",
        "Where is the {shape}?",
        "Where in the image is it?",
        "In which part of the picture is the {shape}?",
        "What is the position of the shape?",
        "Where do you see the {colour} shape?",
        "Tell me where the object is.",
        "In which corner is it, or is it in the middle?",
        "At which position is the {colour} {shape}?",
        "Which part of the image is the object in?",
    ),
    "all": (
        "What do you see?",
        "What is in this image?",
        "Describe the picture.",
        "What does the image show?",
        "Describe this image, please.",
        "What is this?",
        "",  # the image alone
    ),
}
HELD_OUT: dict[str, tuple[str, ...]] = {
    "digit": ("What number is this?", "Which digit do you see here?", "Tell me the digit in the picture."),
    "colour": ("What is the color of the shape?", "Which colour is it?", "Tell me the colour, please."),
    "shape": ("Which shape is it?", "What shape do you see in the picture?", "Tell me the shape."),
    "count": ("How many are there?", "How many shapes do you see?", "Please count the shapes in the image."),
    "place": ("Where is it?", "Where in the picture is the shape?", "Tell me the position of the {shape}."),
}
NUMBERS = ("One", "Two", "Three", "Four")


@dataclass(frozen=True)
class Asked:
    """A question about one scene."""

    about: str
    question: str
    answer: str


def ask(scene: Scene, about: str, wordings: dict[str, tuple[str, ...]], draw: random.Random) -> Asked:
    """A question of that kind, in one of its wordings."""
    question = draw.choice(wordings[about]).format(colour=scene.colour, shape=scene.shape, shapes=_plural(scene.shape))
    return Asked(about, question, answer_to(scene, about))


def kinds_of(scene: Scene) -> tuple[str, ...]:
    """What can be asked about the scene, besides "all"."""
    if scene.digit is not None:
        return ("digit",)
    return "colour", "shape", "count", *(("place",) if scene.place else ())


def answer_to(scene: Scene, about: str) -> str:
    """The answer that is taught."""
    if about == "digit":
        return str(scene.digit)
    if about == "all":
        return _described(scene)
    return str(getattr(scene, about))


def _described(scene: Scene) -> str:
    if scene.digit is not None:
        return f"A handwritten {scene.digit}."
    what = scene.shape if scene.count == 1 else _plural(scene.shape)
    where = "" if scene.place is None else f" in the {scene.place}"
    return f"{NUMBERS[scene.count - 1]} {scene.colour} {what}{where}."


def _plural(shape: str) -> str:
    return f"{shape}es" if shape.endswith("s") else f"{shape}s"
