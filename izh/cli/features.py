"""A tour of the engine, each part run for real on the model at hand.

Owns: what is shown and in which order. Every figure and text printed comes out of the run itself.
Must not know: flags, the engine behind LLM.
"""

import math
import time
from collections.abc import Callable

import numpy as np
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from izh.errors import NotFoundError
from izh.llm import LLM
from izh.model.demo import demo_vision
from izh.multimodal import VisionPath
from izh.request import SamplingParams

STORY = "Once upon a time, in a small village by the sea, there lived"
FACT = "The capital of France is"
ADAPTERS = ("pirate", "json", "label")
MESSAGES = (  # for each adapter, one that it is made for
    "How do I make coffee?",
    "Chiara Moretti from Salzburg turned 34 in March.",
    "The tent does not fit, how can I send it back to you?",
)
LOOKED_AT: tuple[
    tuple[str, tuple[str, ...]], ...
] = (  # pictures that lie beside the demo's eyes, each with what is asked about it
    ("digit.png", ("What digit is this?", "Which number do you see?")),
    ("shapes.png", ("What colour is the shape?", "Which shape do you see?", "Where is the shape?")),
)


def tour(llm: LLM) -> int:
    """Show every feature, on standard output. Returns the exit status."""
    console = Console()
    stops: tuple[tuple[str, Callable[[LLM, Console], None]], ...] = (
        ("Greedy and sampled, in one batch", greedy_and_sampled),
        ("Three answers to one prompt (n=3)", several_choices),
        ("Stop strings end an answer, and are cut from it", stop_strings),
        ("Log-probabilities of the chosen token and of its rivals", logprobs),
        ("Prefix cache: a prompt that begins like an earlier one", prefix_cache),
        ("Streaming: text as it is made", streaming),
        ("A batch: many prompts at once", batching),
        ("Adapters: one prompt, several adapters, one batch", adapters),
        ("Images in the prompt", images),
    )
    for title, stop in stops:
        console.rule(title, align="left")
        stop(llm, console)
        console.print()
    return 0


def greedy_and_sampled(llm: LLM, console: Console) -> None:
    """Different ways of choosing tokens share a step; a seed makes a draw repeatable."""
    ways = {
        "greedy": SamplingParams(temperature=0, max_tokens=20),
        "temperature 0.8, seed 1": SamplingParams(temperature=0.8, seed=1, max_tokens=20),
        "the same again": SamplingParams(temperature=0.8, seed=1, max_tokens=20),
        "temperature 0.8, seed 2": SamplingParams(temperature=0.8, seed=2, max_tokens=20),
    }
    answers = llm.generate([STORY] * len(ways), list(ways.values()), progress=False)
    for name, answer in zip(ways, answers, strict=True):
        console.print(f"[bold]{name}:[/] {_shown(answer.outputs[0].text)}")


def several_choices(llm: LLM, console: Console) -> None:
    """Choices of one request draw from random streams of their own."""
    (answer,) = llm.generate(
        [STORY], SamplingParams(n=3, temperature=0.9, top_p=0.95, seed=7, max_tokens=20), progress=False
    )
    for choice in answer.outputs:
        console.print(f"[bold]choice {choice.index}:[/] {_shown(choice.text)}")


def stop_strings(llm: LLM, console: Console) -> None:
    """The same greedy answer with and without a stop string, which is taken from the answer itself."""
    params = SamplingParams(temperature=0, max_tokens=24)
    whole = llm.generate([STORY], params, progress=False)[0].outputs[0].text
    stop = whole[len(whole) // 2 :].split(" ", 1)[-1][:6]
    (answer,) = llm.generate([STORY], SamplingParams(temperature=0, max_tokens=24, stop=(stop,)), progress=False)
    choice = answer.outputs[0]
    console.print(f"[bold]no stop:[/] {_shown(whole)}")
    console.print(f"[bold]stop {escape(repr(stop))}:[/] {_shown(choice.text)}")
    console.print(f"finish_reason {choice.finish_reason}, stop_reason {escape(repr(choice.stop_reason))}")


def logprobs(llm: LLM, console: Console) -> None:
    """From the distribution before temperature and filters, as the OpenAI API reports them."""
    (answer,) = llm.generate([FACT], SamplingParams(temperature=0, max_tokens=3, logprobs=3), progress=False)
    table = Table("token", "logprob", "rank", "most likely")
    for entry in answer.outputs[0].logprobs or []:
        rivals = ", ".join(f"{_piece(llm, token)} {math.exp(value):.1%}" for token, value in entry.top)
        table.add_row(_piece(llm, entry.token_id), f"{entry.logprob:.3f}", str(entry.rank), rivals)
    console.print(table)


def prefix_cache(llm: LLM, console: Console) -> None:
    """The second prompt reads the KV that the first one wrote, block by block."""
    llm.reset_prefix_cache()
    shared = "You are a careful assistant. Answer in one short sentence, and say so when you do not know. " * 8
    for question in ("What is the capital of France?", "What is the tallest mountain on Earth?"):
        start = time.monotonic()
        (answer,) = llm.generate([shared + question], SamplingParams(temperature=0, max_tokens=1), progress=False)
        seconds = time.monotonic() - start
        console.print(
            f"{len(answer.prompt_token_ids)} prompt tokens, {answer.num_cached_tokens} of them cached: "
            f"first token after {seconds * 1000:.0f} ms"
        )


def streaming(llm: LLM, console: Console) -> None:
    """Deltas add up to the whole answer."""
    num_deltas = 0
    for delta in llm.stream(STORY, SamplingParams(temperature=0, max_tokens=24)):
        num_deltas += 1
        console.print("".join(output.text for output in delta.outputs), end="", markup=False, highlight=False)
    console.print(f"\n({num_deltas} deltas)")


def batching(llm: LLM, console: Console) -> None:
    """One request at a time against all at once: the same greedy tokens, sooner."""
    subjects = ("rain", "bread", "the moon", "a clock", "music", "iron", "a river", "sleep")
    prompts = [f"Here is a short note about {subject}:" for subject in subjects]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    llm.reset_prefix_cache()
    start = time.monotonic()
    alone = [llm.generate([prompt], params, progress=False)[0] for prompt in prompts]
    alone_s = time.monotonic() - start
    llm.reset_prefix_cache()
    start = time.monotonic()
    together = llm.generate(prompts, params, progress=False)
    together_s = time.monotonic() - start
    num_equal = sum(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(alone, together, strict=True))
    console.print(
        f"{len(prompts)} prompts one after the other: {alone_s:.2f} s; in one batch: {together_s:.2f} s; "
        f"{num_equal} of {len(prompts)} answers identical"
    )


def adapters(llm: LLM, console: Console) -> None:
    """The same messages to the base model and to each of the demo model's adapters, in one call."""
    if not llm.tokenizer.has_chat_template:
        console.print("skipped: the adapters shown here answer messages, and this model has no chat template")
        return
    prompts = [llm.tokenizer.chat([{"role": "user", "content": message}]) for message in MESSAGES]
    asked = [(prompt, name) for prompt in prompts for name in (None, *ADAPTERS)]
    params = SamplingParams(temperature=0, max_tokens=32)
    try:
        answers = llm.generate(
            [prompt for prompt, _ in asked], params, lora=[name for _, name in asked], progress=False
        )
    except NotFoundError as error:
        console.print(f"skipped: {escape(str(error))} (the demo model comes with {', '.join(ADAPTERS)})")
        return
    texts = iter(_shown(answer.outputs[0].text) for answer in answers)
    table = Table("message", "base model", *ADAPTERS, show_lines=True)
    for message in MESSAGES:
        table.add_row(escape(message), *(next(texts) for _ in range(1 + len(ADAPTERS))))
    console.print(table)
    console.print(f"{len(asked)} requests, {len(ADAPTERS)} adapters and the base model, in one batch")


def images(llm: LLM, console: Console) -> None:
    """Pictures that the demo's eyes were not trained on, through its encoder into the prompts of one batch."""
    if llm.options.model != "demo":
        console.print("skipped: the pictures shown here are for the demo model, whose eyes know digits and shapes")
        return
    eyes = VisionPath.load(demo_vision(), llm.tokenizer)
    pictures, prompts = [], []
    for name, questions in LOOKED_AT:
        with Image.open(demo_vision() / name) as file:
            pictures.append(file.convert("RGB"))
        prepared = eyes.prepare(pictures[-1:])
        rows = eyes.encode(prepared)
        for question in questions:
            parts = [{"type": "image"}, {"type": "text", "text": question}]
            prompts.append(eyes.lay_out([{"role": "user", "content": parts}], prepared).prompt(rows))
    answers = llm.generate(
        [prompt.token_ids for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=16),
        features=[prompt.features() for prompt in prompts],
        progress=False,
    )
    texts = iter(_shown(answer.outputs[0].text) for answer in answers)
    table = Table("image", "question", "answer", show_lines=True)
    for picture, (_, questions) in zip(pictures, LOOKED_AT, strict=True):
        table.add_row(_drawn(picture), "\n".join(questions), "\n".join(next(texts) for _ in questions))
    console.print(table)
    console.print(f"an image is {eyes.encoder.config.num_patches} tokens of its prompt")


def _drawn(picture: Image.Image) -> Text:
    """The picture in 16 columns and 8 lines: the more a character fills, the farther its pixel is from the ground."""
    pixels = np.asarray(picture.resize((16, 8), Image.Resampling.BOX)).astype(int)
    ground = pixels[0, 0]
    farthest = max(1, np.abs(pixels - ground).max())
    text = Text("\n").join(
        Text().join(
            Text(
                " \u2591\u2592\u2593\u2588"[np.abs(pixel - ground).max() * 4 // farthest],
                "rgb({},{},{})".format(*pixel),
            )
            for pixel in line
        )
        for line in pixels
    )
    text.stylize("on rgb({},{},{})".format(*ground))
    return text


def _piece(llm: LLM, token_id: int) -> str:
    return escape(repr(llm.tokenizer.piece(token_id)[0]))


def _shown(text: str) -> str:
    return escape(" ".join(text.split()))
