"""The encoder against transformers: vectors, logits, and what a batch must not change."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moiety_engine.config import EngineConfig, NormalizeEmbeddings, PoolingChoice
from moiety_engine.encoder.config import ScoreActivation, read_encoder_spec
from moiety_engine.encoder.network import EncoderNetwork, load_encoder
from moiety_engine.errors import InvalidConfig
from moiety_engine.model.errors import ConfigError, UnsupportedModelError, WeightsError

from .conftest import SaveEncoder

Input = tuple[list[int], int]


def inputs_of(seed: int, count: int = 12) -> list[Input]:
    chance = random.Random(seed)
    sizes = [chance.randint(1, 64) for _ in range(count)]
    return [([chance.randrange(99) for _ in range(size)], chance.randrange(size)) for size in sizes]


def loaded(folder: Path, **options: Any) -> EncoderNetwork:
    spec = read_encoder_spec(folder, configured(folder, **options))
    return load_encoder(folder, spec, torch.device("cpu"), torch.float32)


def configured(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), name="e", **options)


def expected(model: Any, one: Input) -> Any:
    ids, second = one
    types = [int(0 < second <= i) if model.config.type_vocab_size > 1 else 0 for i in range(len(ids))]
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types]))


def set_pooling(folder: Path, pooling: dict[str, Any], *, normalizes: bool = True) -> None:
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")][: 2 + normalizes]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


POOLINGS = {
    "pooling_mode_cls_token": lambda hidden_TD: hidden_TD[0],
    "pooling_mode_mean_tokens": lambda hidden_TD: hidden_TD.mean(0),
    "pooling_mode_mean_sqrt_len_tokens": lambda hidden_TD: hidden_TD.sum(0) / len(hidden_TD) ** 0.5,
    "pooling_mode_max_tokens": lambda hidden_TD: hidden_TD.max(0).values,
    "pooling_mode_lasttoken": lambda hidden_TD: hidden_TD[-1],
}


def assert_vectors_agree(row_D: Any, wanted_D: Any) -> None:
    torch.testing.assert_close(row_D, wanted_D, atol=2e-5, rtol=1e-4)


def unit(vector_D: Any) -> Any:
    return torch.nn.functional.normalize(vector_D, dim=0)


@pytest.mark.parametrize("mode", POOLINGS)
def test_the_vectors_of_a_mixed_batch_are_those_of_transformers_alone(save_encoder: SaveEncoder, mode: str) -> None:
    folder, model = save_encoder()
    set_pooling(folder, {"word_embedding_dimension": 32, **{name: name == mode for name in POOLINGS}})
    batch = inputs_of(1)
    for row_D, one in zip(loaded(folder).run(batch), batch, strict=True):
        assert_vectors_agree(row_D, unit(POOLINGS[mode](expected(model, one).last_hidden_state[0])))


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "camembert"])
def test_the_vectors_of_robertas_are_those_of_transformers_also_with_padding_tokens_in_the_text(
    save_encoder: SaveEncoder, family: str
) -> None:
    folder, model = save_encoder(family)
    padding = model.config.pad_token_id
    batch = [*inputs_of(1), ([7, padding, 8, 9, padding], 0), ([padding], 0), ([3] * 64, 0)]
    assert read_encoder_spec(folder).max_context_tokens == 64
    for row_D, one in zip(loaded(folder).run(batch), batch, strict=True):
        assert_vectors_agree(row_D, unit(expected(model, one).last_hidden_state[0].mean(0)))


@pytest.mark.parametrize("choice", ["mean", "cls", "last", "max"])
@pytest.mark.parametrize("normalize", ["auto", "on", "off"])
def test_options_replace_the_pooling_of_the_checkpoint(save_encoder: SaveEncoder, choice: str, normalize: str) -> None:
    folder, model = save_encoder("roberta")
    set_pooling(folder, {"pooling_mode_mean_sqrt_len_tokens": True}, normalizes=False)
    options = {"pooling": PoolingChoice(choice), "normalize_embeddings": NormalizeEmbeddings(normalize)}
    pool = POOLINGS[
        {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "last": "pooling_mode_lasttoken"}.get(
            choice, "pooling_mode_max_tokens"
        )
    ]
    one: Input = ([5, 6, 7, 8], 0)
    (row_D,) = loaded(folder, **options).run([one])
    wanted_D = pool(expected(model, one).last_hidden_state[0])
    assert_vectors_agree(row_D, unit(wanted_D) if normalize == "on" else wanted_D)


def test_vectors_have_their_own_length_where_the_modules_do_not_normalize(save_encoder: SaveEncoder) -> None:
    folder, model = save_encoder()
    set_pooling(folder, {"pooling_mode_mean_sqrt_len_tokens": True}, normalizes=False)
    one: Input = ([5, 6, 7, 8], 0)
    (row_D,) = loaded(folder).run([one])
    assert_vectors_agree(row_D, expected(model, one).last_hidden_state[0].sum(0) / 2)
    assert abs(float(row_D.norm()) - 1) > 0.1


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta"])
@pytest.mark.parametrize("act", ["gelu", "gelu_new", "relu"])
@pytest.mark.parametrize("labels", [("relevant",), ("a", "b", "c")])
def test_the_logits_of_a_head_are_those_of_transformers(
    save_encoder: SaveEncoder, family: str, labels: tuple[str, ...], act: str
) -> None:
    folder, model = save_encoder(family, labels, hidden_act=act)
    network, batch = loaded(folder), inputs_of(2)
    assert network.spec.labels == labels
    for row_E, one in zip(network.run(batch), batch, strict=True):
        torch.testing.assert_close(row_E, expected(model, one).logits[0], atol=5e-5, rtol=1e-4)


def test_a_head_takes_no_pooling(save_encoder: SaveEncoder) -> None:
    folder, _ = save_encoder("roberta", ("a", "b"))
    with pytest.raises(InvalidConfig, match="has a classification head and makes no embeddings"):
        read_encoder_spec(folder, configured(folder, pooling=PoolingChoice.MEAN))


def test_the_second_text_of_a_pair_changes_the_logits(save_encoder: SaveEncoder) -> None:
    folder, _ = save_encoder("bert", ("relevant",))
    one, pair = loaded(folder).run([([1, 2, 3, 4], 0), ([1, 2, 3, 4], 2)])
    assert abs(float(one - pair)) > 1e-3


def test_old_names_of_norms_are_read(save_encoder: SaveEncoder) -> None:
    folder, model = save_encoder()
    path = folder / "model.safetensors"
    old = {
        "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): one
        for name, one in load_file(path).items()
    }
    save_file(old, path)
    hidden_TD = expected(model, ([5, 6], 0)).last_hidden_state[0]
    wanted_D = torch.nn.functional.normalize(hidden_TD.mean(0), dim=0)
    torch.testing.assert_close(loaded(folder).run([([5, 6], 0)])[0], wanted_D, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("config", "num_labels", "activation"),
    [
        ({}, 1, ScoreActivation.SIGMOID),
        ({}, 3, ScoreActivation.SOFTMAX),
        ({"problem_type": "regression"}, 1, ScoreActivation.IDENTITY),
        ({"problem_type": "multi_label_classification"}, 3, ScoreActivation.SIGMOID),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            1,
            ScoreActivation.IDENTITY,
        ),
    ],
)
def test_the_activation_is_the_checkpoints_own(
    save_encoder: SaveEncoder, config: dict[str, Any], num_labels: int, activation: ScoreActivation
) -> None:
    folder, _ = save_encoder("bert", tuple("abc"[:num_labels]))
    edit(folder, **config)
    assert read_encoder_spec(folder).activation is activation


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_context_is_the_shorter_of_the_positions_and_the_sentence_limit(save_encoder: SaveEncoder) -> None:
    folder, _ = save_encoder()
    assert read_encoder_spec(folder).max_context_tokens == 64
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')
    assert read_encoder_spec(folder).max_context_tokens == 40
    assert read_encoder_spec(folder, configured(folder, max_context_tokens=50)).max_context_tokens == 50
    with pytest.raises(ConfigError, match="exceeds the model's 64 positions"):
        read_encoder_spec(folder, configured(folder, max_context_tokens=65))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "use a checkpoint with absolute positions"),
        ({"is_decoder": True}, "use an encoder checkpoint"),
        ({"hidden_act": "mish"}, "must be one of gelu"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, "activation 'tanh'"),
    ],
)
def test_an_unsupported_checkpoint_is_refused_with_the_reason(
    save_encoder: SaveEncoder, changes: dict[str, Any], message: str
) -> None:
    folder, _ = save_encoder()
    edit(folder, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        read_encoder_spec(folder)


def test_an_unsupported_module_or_pooling_is_refused(save_encoder: SaveEncoder) -> None:
    folder, _ = save_encoder()
    set_pooling(folder, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True})
    with pytest.raises(UnsupportedModelError, match="pooling mean, cls is not supported"):
        read_encoder_spec(folder)
    (folder / "modules.json").write_text('[{"path": "", "type": "sentence_transformers.models.Dense"}]')
    with pytest.raises(UnsupportedModelError, match="the modules Dense are not supported"):
        read_encoder_spec(folder)


def test_weights_that_do_not_fit_are_refused(save_encoder: SaveEncoder) -> None:
    folder, _ = save_encoder()
    edit(folder, num_hidden_layers=4)
    with pytest.raises(WeightsError, match=r"lacks the tensor 'encoder\.layer\.3"):
        loaded(folder)
    edit(folder, num_hidden_layers=3, intermediate_size=50)
    with pytest.raises(WeightsError, match=r"has shape \(48, 32\), but config.json requires \(50, 32\)"):
        loaded(folder)
