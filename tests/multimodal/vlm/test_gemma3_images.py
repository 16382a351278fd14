"""Gemma 3 with images through our engine, against transformers' own model: an image's rows see each other both ways."""

from dataclasses import replace

import engines
import pytest
import torch
import vision_oracle
import vlms
from vlms import GEMMA3_ROWS


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return vlms.gemma3(tmp_path_factory.mktemp("gemma3"))


def rows(model, inputs):
    return model.get_image_features(inputs["pixel_values"], return_dict=True).pooler_output.flatten(0, 1)


@pytest.mark.parametrize("name", vision_oracle.CONVERSATIONS)
def test_a_conversation_equals_the_official_model(case, name):
    prompt = case.check(vision_oracle.CONVERSATIONS[name], rows)
    assert prompt.sections is None


@pytest.mark.parametrize("tokens", [6, 8, 9, 11, 13])
def test_every_budget_gives_the_same(case, tokens, monkeypatch):
    monkeypatch.setattr(vision_oracle, "CHUNKS", (tokens,))
    case.check(vision_oracle.CONVERSATIONS["three images"], rows)


def prompt_of(case, name):
    made_, pictures = vision_oracle.messages(vision_oracle.CONVERSATIONS[name])
    prepared = case.vision.prepare(pictures)
    return case.vision.lay_out(made_, prepared).prompt(case.vision.encode(prepared))


def test_an_image_that_no_step_has_room_for_ends_as_that_requests_error(case):
    prompt = prompt_of(case, "one image")
    done = engines.run(case.engine(GEMMA3_ROWS + 1), vision_oracle.request("a", prompt))["a"]
    assert done.finish.reason == "error"
    assert done.finish.param == "features.image_rows"
    assert "4 rows side by side" in done.finish.error


def test_a_cached_prefix_may_end_inside_an_image(case):
    """The block with the image's first rows is found again, the one with the last is not full: it is computed."""
    prompt = prompt_of(case, "two sizes in text")
    first = min(prompt.image_rows)
    length = first + GEMMA3_ROWS
    assert first % 4, "a block of 4 ends inside the image"
    assert length % 4, "and the next is not full"
    prompt = replace(
        prompt,
        token_ids=prompt.token_ids[:length],
        image_rows={place: row for place, row in prompt.image_rows.items() if place < length},
        positions=prompt.positions[:, :length],
    )
    engine = case.engine(16)
    cold, warm = (
        engines.run(engine, vision_oracle.request(name, prompt, logprobs=0))[name] for name in ("cold", "warm")
    )
    assert first < warm.num_cached_tokens < length
    assert warm.token_ids == cold.token_ids
    for ours, theirs in zip(warm.logprobs, cold.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=vision_oracle.BOUND)


def test_rows_of_an_image_see_those_after_them(case):
    """The last row of an image changes what the first one becomes."""
    prompt = prompt_of(case, "one image")
    last = max(prompt.image_rows)
    changed = dict(prompt.image_rows)
    changed[last] = changed[last] * -1
    other = replace(prompt, image_rows=changed)
    found = []
    for each in (prompt, other):
        request = vision_oracle.request("a", each, prompt_logprobs=1, max_tokens=1)
        found.append(engines.run(case.engine(64), request)["a"].prompt_logprobs)
    first = min(prompt.image_rows)
    assert found[0][first].logprob == found[1][first].logprob
    assert abs(found[0][first + 1].logprob - found[1][first + 1].logprob) > 1e-3


def test_crops_of_a_long_image_have_rows_of_their_own(tmp_path):
    case = vlms.gemma3(
        tmp_path,
        do_pan_and_scan=True,
        pan_and_scan_min_crop_size=20,
        pan_and_scan_max_num_crops=3,
        pan_and_scan_min_ratio_to_activate=1.2,
    )
    (prepared,) = case.vision.prepare([vision_oracle.picture(90, 24)])
    assert torch.is_tensor(prepared.tensors["pixel_values"])
    assert prepared.num_rows == GEMMA3_ROWS * len(prepared.tensors["pixel_values"])


def test_images_and_text_in_one_batch_are_what_each_is_alone(case):
    """A step has room for one image: the others wait for theirs."""
    names = ["one image", "three images", "two sizes in text", "text alone"]
    prompts = {name: prompt_of(case, name) for name in names}
    alone = {
        name: engines.run(case.engine(9), vision_oracle.request(name, prompt))[name].token_ids
        for name, prompt in prompts.items()
    }
    together = engines.run(
        case.loaded.engine(block_size=4, max_num_seqs=4, max_num_batched_tokens=9),
        *(vision_oracle.request(name, prompt) for name, prompt in prompts.items()),
    )
    assert {name: output.token_ids for name, output in together.items()} == alone


def test_a_preempted_image_is_computed_whole_again(case):
    prompts = {name: prompt_of(case, name) for name in ("one image", "two sizes in text")}
    alone = {
        name: engines.run(case.engine(9), vision_oracle.request(name, prompt, max_tokens=40))[name].token_ids
        for name, prompt in prompts.items()
    }
    longest = max(len(prompt.token_ids) for prompt in prompts.values())
    engine = case.loaded.engine(num_blocks=longest // 4 + 14, block_size=4, max_num_seqs=2, max_num_batched_tokens=9)
    both = engines.run(
        engine, *(vision_oracle.request(name, prompt, max_tokens=40) for name, prompt in prompts.items())
    )
    assert engine.stats.num_preempted > 0
    assert {name: output.token_ids for name, output in both.items()} == alone
