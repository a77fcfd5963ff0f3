# ruff: noqa: F811  fixtures are imported
"""Our Qwen3-VL computes what transformers computes from text and images, however prompts are cut and batched."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.vision_checkpoint import (
    END,
    IMAGE,
    START,
    TEXT,
    VISION,
    folder,  # noqa: F401  a fixture
    oracle,  # noqa: F401  a fixture
    write_checkpoint,
)
from torch import Tensor

from moiety_engine.config import ImageOptions
from moiety_engine.images.prompt_images import PromptImage, PromptImages
from moiety_engine.model.batch import Batch, ImageRows
from moiety_engine.model.errors import ConfigError, UnsupportedModelError
from moiety_engine.model.families import ignored_keys, read_spec, spec_from_config
from moiety_engine.model.image_settings import image_rules, with_image_settings
from moiety_engine.model.loading import load_model
from moiety_engine.model.transformer import Transformer
from moiety_engine.model.vision_encoder import patches_of
from moiety_engine.model.weight_offload import weight_bytes
from moiety_engine.planning.models import find_model
from moiety_engine.runner.image_rows import rotary_positions

TOLERANCE = 1e-4
BLOCK = 16


@pytest.fixture
def model(oracle: Any, folder: Path) -> Transformer:
    return load_model(folder, device="cpu", dtype="float32")


def pixels_of(height: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@dataclass
class Prompt:
    """Text tokens and images, in the order in which they were added."""

    token_ids: list[int] = field(default_factory=list)
    images: list[PromptImage] = field(default_factory=list)

    def text(self, count: int, seed: int) -> Prompt:
        self.token_ids += torch.randint(0, 370, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
        return self

    def image(self, height: int, width: int, seed: int) -> Prompt:
        pixels, side = pixels_of(height, width, seed), 2 * VISION["patch_size"]
        rows, columns = height // side, width // side
        start = len(self.token_ids) + 1
        self.token_ids += [START] + [IMAGE] * (rows * columns) + [END]
        self.images.append(PromptImage(start, rows, columns, height, width, bytes([seed]) * 16, pixels.tobytes()))
        return self

    def patches(self, model: Transformer, image: PromptImage) -> tuple[Tensor, tuple[int, int]]:
        pixels = np.frombuffer(image.pixels, dtype=np.uint8).reshape(image.height, image.width, 3)
        assert model.spec.vision is not None
        return patches_of(torch.from_numpy(pixels.copy()), model.spec.vision)


class Run:
    """One prompt in a paged cache, computed in chunks."""

    def __init__(self, model: Transformer, prompt: Prompt, *, scramble: int = 0) -> None:
        self.model, self.prompt, self.places = (
            model,
            prompt,
            PromptImages(prompt.images, [image.digest for image in prompt.images]),
        )
        self.kv = model.allocate_kv(64, BLOCK)
        for layer in self.kv.layers:
            for part in layer.parts:
                part.fill_(float("nan"))
        self.blocks = torch.randperm(64, generator=torch.Generator().manual_seed(scramble)).tolist()
        self.tokens = list(prompt.token_ids)
        self.num_stored = 0
        assert model.vision is not None
        self.features = {image.start: model.vision.encode(*prompt.patches(model, image)) for image in prompt.images}

    def step(self, count: int) -> Tensor:
        first, end = self.num_stored, self.num_stored + count
        positions_3T = torch.from_numpy(rotary_positions(self.places, first, end))
        parts = self.places.parts(first, end)
        images = None
        if parts:
            rows = torch.cat([torch.arange(n) + image.start + begin - first for image, begin, n, _ in parts])
            features = [self.features[image.start][:, begin : begin + n] for image, begin, n, _ in parts]
            images = ImageRows(rows, positions_3T[:, rows], torch.cat(features, dim=1))
        slots = [self.blocks[place // BLOCK] * BLOCK + place % BLOCK for place in range(first, end)]
        self.num_stored = end
        batch = Batch(
            token_ids_T=torch.tensor(self.tokens[first:end]),
            positions_T=positions_3T[0].contiguous(),
            slots_T=torch.tensor(slots),
            query_start_S1=torch.tensor([0, count], dtype=torch.int32),
            context_len_S=torch.tensor([end], dtype=torch.int32),
            block_table_SB=torch.tensor([self.blocks[: -(-end // BLOCK)]], dtype=torch.int32),
            wanted_rows_L=torch.arange(count),
            num_decode=int(count == 1),
            max_context=end,
            max_query=count,
            images=images,
        )
        return self.model.forward(batch, self.kv)

    def prefill(self, chunk: int) -> Tensor:
        logits = []
        while (left := len(self.tokens) - self.num_stored) > 0:
            logits.append(self.step(min(chunk, left)))
        return torch.cat(logits)

    def greedy(self, count: int) -> list[int]:
        logits, answer = self.prefill(33), []
        for _ in range(count):
            answer.append(int(logits[-1].argmax()))
            self.tokens.append(answer[-1])
            logits = self.step(1)
        return answer


def oracle_inputs(model: Transformer, prompt: Prompt) -> dict[str, Tensor]:
    ids = torch.tensor([prompt.token_ids])
    inputs = {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int()}
    if prompt.images:
        made = [prompt.patches(model, image) for image in prompt.images]
        inputs["pixel_values"] = torch.cat([patches for patches, _ in made])
        inputs["image_grid_thw"] = torch.tensor([[1, *grid] for _, grid in made])
    return inputs


@torch.no_grad()
def expected(oracle: Any, model: Transformer, prompt: Prompt) -> Tensor:
    oracle.model.rope_deltas = None
    return oracle(**oracle_inputs(model, prompt)).logits[0].float().log_softmax(-1)


PROMPTS = {
    "text only": lambda: Prompt().text(90, 1),
    "one image": lambda: Prompt().text(7, 2).image(40, 24, 1).text(20, 3),
    "an image at the start": lambda: Prompt().image(16, 16, 2).text(9, 4),
    "an image at the end": lambda: Prompt().text(5, 4).image(24, 40, 3),
    "images of several sizes between text": lambda: (
        Prompt().text(11, 5).image(64, 24, 4).text(3, 6).image(8, 8, 5).image(24, 96, 6).text(30, 7)
    ),
}


@pytest.mark.parametrize("chunk", [1, 7, 400])
@pytest.mark.parametrize("kind", list(PROMPTS))
def test_logprobs_agree_with_the_oracle_for_every_chunk_size(
    oracle: Any, model: Transformer, kind: str, chunk: int
) -> None:
    prompt = PROMPTS[kind]()
    ours = Run(model, prompt).prefill(chunk).log_softmax(-1)
    assert (ours - expected(oracle, model, prompt)).abs().max().item() <= TOLERANCE


def test_an_image_changes_the_logits_after_it(oracle: Any, model: Transformer) -> None:
    one, other = (Prompt().text(7, 2).image(40, 24, seed).text(20, 3) for seed in (1, 9))
    first, second = Run(model, one).prefill(400), Run(model, other).prefill(400)
    assert torch.equal(first[:8], second[:8])
    assert (first[-1] - second[-1]).abs().max().item() > 0.01


@pytest.mark.parametrize("kind", ["text only", "one image", "images of several sizes between text"])
def test_greedy_answers_are_the_oracles(oracle: Any, model: Transformer, kind: str) -> None:
    prompt = PROMPTS[kind]()
    oracle.model.rope_deltas = None
    with torch.no_grad():
        generated = oracle.generate(**oracle_inputs(model, prompt), max_new_tokens=24, do_sample=False)
    assert Run(model, prompt).greedy(24) == generated[0, len(prompt.token_ids) :].tolist()


@pytest.mark.parametrize("change", ["experts transposed, as published", "encoder without the prefix model."])
def test_the_published_layout_of_tensors_is_read_too(
    oracle: Any, model: Transformer, folder: Path, tmp_path: Path, change: str
) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    for name in list(tensors):
        if change.startswith("experts") and ".experts." in name:
            tensors[name] = tensors[name].mT.contiguous()
        elif change.startswith("encoder") and name.startswith("model.visual."):
            tensors[name.removeprefix("model.")] = tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    prompt = PROMPTS["one image"]()
    other = load_model(tmp_path, device="cpu", dtype="float32")
    assert torch.equal(Run(other, prompt).prefill(400), Run(model, prompt).prefill(400))


def test_tied_embeddings_follow_the_whole_configuration(tmp_path: Path) -> None:
    oracle = write_checkpoint(tmp_path, tied=True)
    tied = load_model(tmp_path, device="cpu", dtype="float32")
    assert tied.spec.tie_word_embeddings
    prompt = PROMPTS["one image"]()
    assert (Run(tied, prompt).prefill(400).log_softmax(-1) - expected(oracle, tied, prompt)).abs().max() <= TOLERANCE


def test_a_key_of_the_text_model_that_is_not_read_is_named_and_no_other(
    oracle: Any, folder: Path, tmp_path: Path
) -> None:
    assert ignored_keys(folder) == []
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["attention_twist"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ignored_keys(tmp_path) == ["attention_twist"]


def test_the_memory_of_the_weights_includes_the_encoder(oracle: Any, folder: Path) -> None:
    own = sum(parameter.numel() for name, parameter in oracle.named_parameters() if ".visual." in name)
    spec = read_spec(folder)
    without = weight_bytes(replace(spec, vision=None), torch.float32)
    assert weight_bytes(spec, torch.float32) - without == 4 * own


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"out_hidden_size": 32}, "out_hidden_size"),
        ({"num_position_embeddings": 35}, "not a square"),
        ({"num_heads": 5}, "multiple of 4 times num_heads"),
        ({"deepstack_visual_indexes": [1, 9]}, "distinct layers"),
    ],
)
def test_an_encoder_that_does_not_fit_is_refused_with_the_reason(change: dict[str, Any], reason: str) -> None:
    config = {"model_type": "qwen3_vl_moe", "text_config": TEXT, "vision_config": VISION | change}
    with pytest.raises((ConfigError, UnsupportedModelError), match=reason):
        spec_from_config(config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_is_bit_for_bit_the_same_for_every_chunk_size(oracle: Any, folder: Path, dtype: str) -> None:
    prompt = PROMPTS["images of several sizes between text"]()
    models = [load_model(folder, device="cpu", dtype=dtype) for _ in range(2)]
    assert torch.equal(Run(models[0], prompt).prefill(5), Run(models[1], prompt, scramble=3).prefill(400))


def test_a_plan_for_machines_knows_the_encoder_s_weights(oracle: Any, folder: Path) -> None:
    served = find_model(str(folder))
    assert served.spec.vision is not None
    without = replace(served.spec, vision=None)
    own = sum(parameter.numel() for name, parameter in oracle.named_parameters() if ".visual." in name)
    assert served.weight_bytes(served.spec) - served.weight_bytes(without) > 2 * own


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"patch_size": 14}, "belong to different models"), ({"image_mean": [0.5]}, "need 3 numbers")],
)
def test_an_image_processor_of_another_model_is_refused(
    oracle: Any, folder: Path, tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=reason):
        with_image_settings(read_spec(folder), tmp_path)


def test_the_image_processor_s_settings_are_those_of_the_checkpoint(oracle: Any, folder: Path, tmp_path: Path) -> None:
    size = {"shortest_edge": 128, "longest_edge": 4096}
    settings = {"size": size, "image_mean": [0.1, 0.2, 0.3], "image_std": [1.0, 2.0, 3.0]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    spec = with_image_settings(read_spec(folder), tmp_path)
    assert spec.vision is not None
    assert (spec.vision.mean, spec.vision.deviation) == ((0.1, 0.2, 0.3), (1.0, 2.0, 3.0))
    rules = image_rules(spec.vision, tmp_path, ImageOptions(max_pixels=2048))
    assert (rules.min_pixels, rules.max_pixels, rules.image_token_id) == (128, 2048, IMAGE)


def test_bfloat16_is_at_most_half_again_as_far_from_float32_as_the_oracles_bfloat16(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    write_checkpoint(tmp_path, dtype=torch.bfloat16)
    exact, narrow = (
        AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager").eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    model = load_model(tmp_path, device="cpu", dtype="bfloat16")
    theirs, ours = [], []
    for kind in ("one image", "images of several sizes between text"):
        prompt = PROMPTS[kind]()
        right = expected(exact, model, prompt)
        theirs.append((expected(narrow, model, prompt) - right).abs())
        ours.append((Run(model, prompt).prefill(400).log_softmax(-1) - right).abs())
    assert torch.cat(ours).mean() <= 1.5 * torch.cat(theirs).mean()
    assert torch.cat(ours).max() <= 1.5 * torch.cat(theirs).max()
