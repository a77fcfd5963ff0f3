"""Features that work with a model, and needs of a checkpoint, derived from its spec, without weights.

`family_table` is the table of families in docs/models.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moiety_engine.cache_setup import can_undo_drafts
from moiety_engine.checkpoint import resolve_checkpoint
from moiety_engine.distribution.layout import Layout, RankPosition
from moiety_engine.encoder.config import is_encoder
from moiety_engine.errors import InvalidConfig
from moiety_engine.model.checkpoint import check_tensor_names
from moiety_engine.model.errors import ModelError
from moiety_engine.model.families import ignored_keys, spec_from_config, stored_quantization
from moiety_engine.model.families.catalog import CATALOG
from moiety_engine.model.mtp_spec import require_mtp
from moiety_engine.model.paged_state_spec import PagedStateSpec
from moiety_engine.model.routed_attention_spec import RoutedAttentionSpec
from moiety_engine.model.spec import AttentionSpec, LatentAttentionSpec
from moiety_engine.model.tensor_shards import own_spec
from moiety_engine.planning.models import find_model, state_bytes
from moiety_text.chat import ChatTemplate
from moiety_text.errors import TextError
from moiety_text.folder import read_text_model
from moiety_text.reasoning_formats import find_reasoning_markers
from moiety_text.tools.registry import find_tool_family
from moiety_wire.engine_choices import LoadFormat

if TYPE_CHECKING:
    from moiety_engine.model.spec import ModelSpec

YES, NO = "yes", "no"
KV_CONTEXT_TOKENS = 32_768  # context for which the cache's bytes of a token are stated: windows and states count once
# Features that depend on nothing in a model.
EVERYWHERE = ("prefix cache", "DP attention", "expert offloading")


@dataclass(frozen=True, slots=True)
class ModelFeatures:
    """Features of a model that depend on its layers; each value is "yes", or says what is different and why."""

    tensor_parallel: str
    expert_parallel: str
    pipeline_parallel: str
    speculation: str  # by n-gram and draft model
    roles: str
    lora: str
    mtp: str
    images: str


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """Supported features of a checkpoint. `missing` names what it needs before it is served or used for chat.

    `weight_format`: that of its large matrices in memory. `quantization`: that of its files. `state_bytes`: recurrent
    states of one request.
    """

    model: str
    family: str
    weight_bytes: int
    weight_format: str
    quantization: str | None
    kv_bytes_per_token: int
    state_bytes: int
    max_context_tokens: int
    features: ModelFeatures
    missing: tuple[str, ...]
    ignored_keys: tuple[str, ...]
    tool_format: str | None
    reasoning_format: str | None


def features_of(spec: ModelSpec) -> ModelFeatures:
    """Return the features that work with a model."""
    latent = any(isinstance(layer.attention, LatentAttentionSpec) for layer in spec.layers)
    grouped = [one.attention for one in spec.layers if isinstance(one.attention, AttentionSpec)]
    shares_rows = any(one.keys_are_values for one in grouped)
    compressed = any(isinstance(one.attention, PagedStateSpec) for one in spec.layers)
    routed = any(isinstance(one, RoutedAttentionSpec) for one in grouped)
    lora = "feed-forward only" if latent or compressed or routed else "not q, k, v" if shares_rows else YES
    if any(one.ffn is not None and not one.ffn.activation.gated for one in spec.layers):
        lora = "attention only"
    return ModelFeatures(
        tensor_parallel=_divides(spec, Layout(tp=2)),
        expert_parallel=_divides(spec, Layout(dp=2, ep=2)),
        pipeline_parallel=_divides(spec, Layout(pp=2)),
        speculation=YES if can_undo_drafts(spec) else f"{NO}: not all recurrent layers can replay tokens",
        roles=YES,
        lora="attention's output only" if spec.has_normed_experts and shares_rows else lora,
        mtp=NO if spec.mtp is None else YES,
        images=NO if spec.vision is None else YES,
    )


def _divides(spec: ModelSpec, layout: Layout) -> str:
    try:
        own_spec(spec, RankPosition(layout, 0))
    except InvalidConfig as exc:
        return f"{NO}: {exc}"
    return YES


def report_on(model: str, weights: str = "auto", kv_dtype: str = "auto") -> CheckpointReport:
    """Return what would be served of a folder, a GGUF file, a config.json or a hub id; "" is the demo model.

    Of a hub id, and of a config.json, only the configuration is read. Raises EngineError, with the reason, if the model
    would not be served.
    """
    path = Path(model).expanduser()
    is_config = path.is_file() and path.suffix != ".gguf"
    if is_config and path.name != "config.json":
        raise InvalidConfig(
            f"{model} is a file that is not called config.json: give a config.json, its folder, or a GGUF file"
        )
    folder = path.parent if is_config else resolve_checkpoint(model, ("config.json",))
    if is_encoder(folder):
        raise InvalidConfig(
            f"{folder} has an encoder, for embeddings, scores and classification, which has no KV cache and no "
            "layouts: start it to see whether it is served"
        )
    served = find_model(str(folder.resolve()), weights, kv_dtype)
    stored = stored_quantization(folder)
    features, max_context = features_of(served.spec), served.spec.max_context_tokens
    report = CheckpointReport(
        model=served.name,
        family=served.spec.family,
        weight_bytes=served.weight_bytes(served.spec),
        weight_format="bfloat16" if served.form is None else served.form.name,
        quantization=None if stored is None else stored.name,
        kv_bytes_per_token=served.kv_bytes_per_token(served.spec, min(KV_CONTEXT_TOKENS, max_context)),
        state_bytes=sum(state_bytes(layer.attention) for layer in served.spec.layers),
        max_context_tokens=max_context,
        features=features,
        missing=(),
        ignored_keys=tuple(ignored_keys(folder)),
        tool_format=None,
        reasoning_format=None,
    )
    has_files = path.is_dir() or path.suffix == ".gguf" or not model
    return _with_files(report, folder, served.spec) if has_files and not is_config else report


def _with_files(report: CheckpointReport, folder: Path, spec: ModelSpec) -> CheckpointReport:
    """Return the report with what the files of the folder have and lack."""
    missing = []
    try:
        check_tensor_names(folder, spec)
    except ModelError as exc:
        missing.append(str(exc))
    features = report.features
    if spec.mtp is not None and not missing:
        try:
            require_mtp(folder, spec, LoadFormat.AUTO)
        except ModelError as exc:
            features = replace(features, mtp=f"{NO}: {exc}")
    tool_format = reasoning_format = None
    try:
        text = read_text_model(folder)
        template = ChatTemplate(text.chat_template, text.special_tokens) if text.chat_template else None
    except TextError as exc:
        missing.append(str(exc))
    else:
        if template is None:
            missing.append("no chat template: chat needs one, completions do not")
        else:
            tools, markers = find_tool_family(text.chat_template), find_reasoning_markers(template)
            tool_format = None if tools is None else tools.name
            reasoning_format = None if markers is None else markers.name
    return replace(
        report, features=features, missing=tuple(missing), tool_format=tool_format, reasoning_format=reasoning_format
    )


def family_spec(family: str) -> ModelSpec:
    """Return the spec of a typical model of the family: the defaults of its class and the catalogue's settings."""
    return spec_from_config({"model_type": family} | CATALOG[family].settings)


def family_features(family: str) -> ModelFeatures:
    """Return the features of a family; those of MTP for a model that has such a layer."""
    spec = family_spec(family)
    drafting = spec_from_config({"model_type": family, "num_nextn_predict_layers": 1} | CATALOG[family].settings)
    return replace(features_of(spec), mtp=NO if drafting.mtp is None else YES)


def family_table() -> str:
    """Return the table of families of docs/models.md, in Markdown."""
    lines = [
        "| `model_type` | for example | attention | feed-forward | TP | EP | LoRA | MTP |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for family, entry in sorted(CATALOG.items()):
        found = family_features(family)
        answers = (found.tensor_parallel, found.expert_parallel, found.lora, found.mtp)
        cells = (f"`{family}`", entry.examples, entry.attention, entry.feed_forward, *map(_short, answers))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _short(answer: str) -> str:
    return answer.partition(":")[0]
