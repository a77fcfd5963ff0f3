"""Loading of the draft model or MTP layers, with a check that a draft model has the served model's vocabulary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from moiety_engine.config import Speculate
from moiety_engine.distribution.layout import RankPosition
from moiety_engine.errors import InvalidConfig
from moiety_engine.model.families import read_spec
from moiety_engine.model.loading import load_model, load_mtp, load_options
from moiety_text.errors import TextError
from moiety_text.folder import read_text_model
from moiety_text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from moiety_engine.config import EngineConfig
    from moiety_engine.distribution.collectives import Ranks
    from moiety_engine.model.transformer import Transformer

log = structlog.get_logger()


def load_draft_models(
    config: EngineConfig, model: Transformer, progress: Callable[[int, int], None] | None = None
) -> tuple[Transformer, ...]:
    """Load the draft model that the configuration names, with the model's device, dtype and quantization.

    Returns a draft model, the checkpoint's MTP layers, or (). Of several ranks each loads its own part only. Raises
    InvalidConfig if the vocabularies differ, or if the layout cannot divide the model, and the errors of `load_model`.
    """
    how = load_options(config, str(model.device), progress)
    how["ranks"] = with_own_experts(model.ranks)
    if config.speculate is Speculate.MTP:
        return load_mtp(Path(config.model), model, **how)
    if config.speculate is not Speculate.DRAFT:
        return ()
    folder = Path(config.draft_model)
    ours, its = model.spec.vocab_size, read_spec(folder).vocab_size
    if ours != its:
        raise InvalidConfig(
            f"the draft model has {its} tokens in its vocabulary and the model {ours}: use a "
            "--draft-model of the same family, with the same vocabulary, or --speculate ngram, which "
            "needs none"
        )
    has_experts = bool(read_spec(folder).moe_layers)
    if read_spec(folder).recurrent_layers:
        raise InvalidConfig(
            "the draft model has recurrent layers, whose states are not kept for drafts: use a --draft-model without "
            "them, --speculate mtp if the model has an MTP layer, or --speculate ngram"
        )
    _check_tokens(Path(config.model), folder)
    if not has_experts:
        how["ranks"] = without_experts(model.ranks)
    return (load_model(folder, **how),)


def with_own_experts(ranks: Ranks) -> Ranks:
    """Return the groups of a draft model or MTP layer whose experts, if it has any, are on the ranks with attention.

    Expert ranks hold those of the model. Each expert of the draft is then whole.
    """
    position = ranks.rank_position
    if not position.layout.ffn_ranks:
        return ranks
    ep = position.layout.stage_size
    layout = replace(position.layout, ep=ep, redundant_experts=0, ffn_ranks=0, excluded=(), is_scaled=True)
    found = replace(ranks, rank_position=RankPosition(layout, position.rank))
    found.experts, found.crossings, found.transfers = ranks.draft_experts, (), None
    return found


def without_experts(ranks: Ranks) -> Ranks:
    """Return the groups of a model without experts on the ranks with attention of a model with experts."""
    position = ranks.rank_position
    layout = replace(position.layout, ep=1, redundant_experts=0, ffn_ranks=0, excluded=(), is_scaled=False)
    found = replace(ranks, rank_position=RankPosition(layout, position.rank))
    found.experts, found.crossings, found.transfers = None, (), None
    return found


def _check_tokens(folder: Path, draft_folder: Path) -> None:
    """Raise InvalidConfig if the tokenizers differ; a checkpoint without a tokenizer passes with a warning."""
    found = []
    for one in (folder, draft_folder):
        try:
            found.append(read_text_model(one).tokenizer_json)
        except TextError as exc:
            log.warning(
                "draft_tokenizer_not_compared",
                reason=str(exc),
                advice="make sure that the draft model and the model have the same tokenizer",
            )
            return
    if found[0] == found[1]:
        return
    ours, its = (Tokenizer.from_json(text) for text in found)
    for token_id in range(max(ours.vocab_size, its.vocab_size)):
        mine, other = ours.find_token(token_id), its.find_token(token_id)
        if mine != other:
            raise InvalidConfig(
                f"token {token_id} is {other!r} in the draft model and {mine!r} in the model: use a "
                "--draft-model of the same family, with the same vocabulary, or --speculate ngram, which "
                "needs none"
            )
