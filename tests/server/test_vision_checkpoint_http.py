"""A trained kind of checkpoint that sees, served as it lies: its own tower, processor and template, over HTTP."""

import openai
import pytest
import seeing
import torch
import vision_oracle
from serving import serving
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from izh.engine.async_llm import AsyncLLM

MEDIA = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """(folder, the case): a tiny random Qwen2-VL."""
    folder = tmp_path_factory.mktemp("served") / "qwen"
    folder.mkdir()
    tokenizer = vision_oracle.tokenizer("<|vision_start|><|image_pad|><|vision_end|>", *MEDIA)
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(MEDIA))
    config = Qwen2VLConfig(
        vision_config={
            "depth": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_heads": 2,
            "embed_dim": 32,
            "hidden_size": 64,
            "mlp_ratio": 2,
        },
        text_config=vision_oracle.TEXT
        | {
            "vocab_size": len(tokenizer),
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )
    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=256, max_pixels=1600
    )
    return folder, vision_oracle.make(folder, Qwen2VLForConditionalGeneration, config, tokenizer, images)


def test_the_openai_client_sends_images_to_a_checkpoint_that_sees(case):
    folder, oracle = case
    with (
        serving(AsyncLLM(model=str(folder), kv_cache_gb=0.02, num_threads=1)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        for seeds in ((0,), (1, 2), (0,)):  # the last from the cache
            pictures = [vision_oracle.picture(40, 40, seed) for seed in seeds]
            parts = [seeing.image(seeing.uri(picture)) for picture in pictures]
            answer = client.chat.completions.create(
                model="qwen",
                messages=[seeing.user(*parts, seeing.text("what is this?"))],
                max_tokens=12,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            theirs = oracle.official_inputs([("user", [*pictures, "what is this?"])])
            assert answer.usage.prompt_tokens == theirs["input_ids"].shape[1]
            with torch.inference_mode():
                whole = oracle.model.generate(**theirs, max_new_tokens=12, do_sample=False)
            ids = whole[0, theirs["input_ids"].shape[1] :].tolist()
            assert answer.choices[0].message.content == oracle.processor.tokenizer.decode(ids, skip_special_tokens=True)
        text = client.chat.completions.create(
            model="qwen", messages=[{"role": "user", "content": "hello"}], max_tokens=2, temperature=0
        )
        assert text.choices[0].finish_reason in ("stop", "length")
