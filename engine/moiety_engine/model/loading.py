"""Loading of a checkpoint folder into a Transformer."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Required, TypedDict, Unpack

import structlog
import torch

from moiety_engine.config import EngineConfig, OffloadConfig
from moiety_engine.distribution.collectives import SINGLE_RANK_GROUPS, Ranks
from moiety_engine.distribution.deep_ep_all_to_all import require_deep_ep
from moiety_engine.memory import device_memory
from moiety_engine.model.arithmetic import Arithmetic, cannot_be_invariant
from moiety_engine.model.checkpoint import load
from moiety_engine.model.dummy import draw_weights
from moiety_engine.model.errors import UnsupportedModelError
from moiety_engine.model.families import read_spec
from moiety_engine.model.head import narrow_head_bytes, with_narrow_head
from moiety_engine.model.image_settings import with_image_settings
from moiety_engine.model.mtp_spec import mtp_spec, num_mtp_layers, require_mtp
from moiety_engine.model.offloading import budget, most_chosen, open_store
from moiety_engine.model.remote_experts import ExpertServer
from moiety_engine.model.spec import LatentAttentionSpec, ModelSpec, MoeSpec
from moiety_engine.model.tensor_shards import check_cuts, own_spec
from moiety_engine.model.transformer import Transformer
from moiety_engine.model.transformer_options import TransformerOptions
from moiety_engine.model.weight_offload import require_fit, weight_bytes
from moiety_engine.model.weight_quantizer import as_packed_for_a_gpu, bytes_in, takes_products
from moiety_engine.model.weights import ModelWeights
from moiety_kernels.cpu.beginning import begin
from moiety_kernels.mla_attention import reads_whole_numbers
from moiety_kernels.moe import MOE_KERNELS, unavailable
from moiety_kernels.quantization import FORMATS, INT4, INT8
from moiety_kernels.quantization.on_gpu import FLOAT8_CAPABILITY
from moiety_kernels.quantization.weight import BLOCK, GPU_PACK
from moiety_wire.engine_choices import ExpertAll2All, LoadFormat

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from moiety_engine.distribution.layout import Layout, RankPosition
    from moiety_engine.model.vocabulary import Vocabulary
    from moiety_kernels.quantization import WeightFormat

log = structlog.get_logger()

KV_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_EXACT = "--dtype float32 requires exact products"
_IN_PLACE = OffloadConfig()
_WHOLE_NUMBERS = {INT8.name, INT4.name}


class LoadOptions(TypedDict, total=False):
    """Keyword arguments of `load_share`."""

    device: Required[str]
    dtype: Required[str]
    quantization: str
    kv_dtype: str
    moe_kernel: str
    batch_invariant: bool
    num_threads: int | None
    load_format: LoadFormat
    ranks: Ranks
    offload: OffloadConfig
    local_ranks: int
    progress: Callable[[int, int], None] | None
    keeps_hidden: bool
    frees_windows: bool
    max_context_tokens: int | None
    expert_all2all: ExpertAll2All


@dataclass(frozen=True, slots=True)
class WeightShard:
    """Loaded part of a model on one rank; with a single rank, the whole model."""

    spec: ModelSpec
    weights: ModelWeights
    options: TransformerOptions

    def transformer(self, vocabulary: Vocabulary | None = None) -> Transformer:
        """Return the Transformer of a rank with layers. `vocabulary`: another model's, for a model without one."""
        return Transformer(self.spec, self.weights, self.options, vocabulary)

    def experts(self, ranks: Ranks | None = None) -> ExpertServer:
        """Return the server of a rank with experts only. `ranks`: its groups, unless they were known while loading."""
        given = self.options
        return ExpertServer(
            self.spec,
            self.weights,
            arithmetic=given.arithmetic,
            ranks=given.ranks if ranks is None else ranks,
            expert_cache=given.expert_cache,
        )


def load_options(config: EngineConfig, device: str, progress: Callable[[int, int], None] | None) -> LoadOptions:
    """Return the options that a configuration gives to all models of an engine."""
    return {
        "device": device,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "moe_kernel": config.moe_kernel,
        "load_format": config.load_format,
        "progress": progress,
        "max_context_tokens": config.max_context_tokens,
        "expert_all2all": config.expert_all2all,
    }


def load_model(folder: Path, **how: Unpack[LoadOptions]) -> Transformer:
    """Load the model on a rank with layers; see `load_share`."""
    return load_share(folder, **how).transformer()


def load_mtp(folder: Path, model: Transformer, **how: Unpack[LoadOptions]) -> tuple[Transformer, ...]:
    """Load the multi-token prediction (MTP) layers of the model's checkpoint; see `load_share`."""
    count = num_mtp_layers(folder, model.spec, how.get("load_format", LoadFormat.AUTO))
    shares = [load_share(folder, mtp_index=index, **how) for index in range(count)]
    return tuple(share.transformer(model.vocabulary) for share in shares)


def load_share(
    folder: Path,
    *,
    device: str,
    dtype: str,
    quantization: str = "auto",
    kv_dtype: str = "auto",
    moe_kernel: str = "auto",
    batch_invariant: bool = False,
    num_threads: int | None = None,
    load_format: LoadFormat = LoadFormat.AUTO,
    ranks: Ranks = SINGLE_RANK_GROUPS,
    offload: OffloadConfig = _IN_PLACE,
    local_ranks: int = 1,
    progress: Callable[[int, int], None] | None = None,
    keeps_hidden: bool = False,
    frees_windows: bool = False,
    mtp_index: int | None = None,
    max_context_tokens: int | None = None,
    expert_all2all: ExpertAll2All = ExpertAll2All.AUTO,
) -> WeightShard:
    """Load the checkpoint in `folder` for `device` ("cpu", "cuda", "cuda:1").

    With dummy weights only its config.json is read. Of several `ranks` each reads its own part only.

    `dtype`: "float32", "bfloat16", or "auto": float32 for a float32 checkpoint, else bfloat16. On a CPU bfloat16
    applies to the weights only; activations are float32.
    `quantization`: format of the products' weights, "none" or one of FORMATS; "auto": that of the checkpoint. An
    integer format that is named explicitly may include the head (see `head`).
    `kv_dtype`: type of the KV cache: "auto" is that of the activations; "bf16" requires bfloat16 weights; "fp8" and
    "int8" require a GPU.
    `moe_kernel`: kernel that computes the experts; "auto" takes the fastest.
    `batch_invariant`: a request's bits do not depend on the rest of the batch.
    `num_threads`: number of threads of the process.
    `offload`: which experts need not be on the device. `local_ranks`: ranks of this host, which share its memory.
    `progress` is called with (bytes read, bytes in all).
    `keeps_hidden`: the KV cache keeps hidden states for an MTP layer. `frees_windows`: see TransformerOptions.
    `mtp_index`: load only the MTP layer with this index.
    `max_context_tokens`: longest context that is served, on which LongRoPE depends; None: the model's longest.
    `expert_all2all`: how ranks with different tokens exchange them for experts.

    Raises ModelError, InvalidConfig, and OutOfMemory with the figures.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    where = torch.device(device)
    compiler = begin() if where.type == "cpu" else None
    spec = _spec(folder, load_format, max_context_tokens, keeps_hidden=keeps_hidden)
    spec = spec if mtp_index is None else mtp_spec(spec, mtp_index)
    stored = None if load_format is LoadFormat.DUMMY else spec.weight_format
    wanted = _form(quantization, stored, exact=dtype == "float32")
    dtype = _dtype_name(dtype, spec)
    own = own_spec(spec, position := ranks.rank_position)
    form = _on_device(wanted, spec, where, DTYPES[dtype], moe_kernel, is_explicit=quantization != "auto")
    form = _uncut(form, spec, position, dtype, is_explicit=quantization != "auto")
    _check_form_cuts(form, stored, spec, position.layout)
    cached_in = None if kv_dtype == "auto" else _cached_in(kv_dtype, spec, where, DTYPES[dtype])
    head_too = compiler is not None and quantization in _WHOLE_NUMBERS
    num_bytes = _weight_bytes(form, own, DTYPES[dtype], head_too=head_too)
    _check_moe_kernel(moe_kernel, spec, where, DTYPES[dtype], form)
    _check_all_to_all(expert_all2all, where, DTYPES[dtype])
    if batch_invariant and (reason := cannot_be_invariant(own, where, DTYPES[dtype], form, moe_kernel)) is not None:
        raise UnsupportedModelError(f"--batch-invariant is not available: {reason}")
    with ExitStack() as undo:
        offloading = open_store(offload, folder, spec, where, f"{dtype} {form}", load_format, position)
        if offloading is not None:
            undo.callback(offloading.store.close)  # on failure only: afterwards the cache owns the store
        memory, expert_budget_bytes = device_memory(where), 0
        if offloading is not None:
            of_rank = memory if where.type == "cuda" else memory._replace(free_bytes=memory.free_bytes // local_ranks)
            expert_budget_bytes, in_store_bytes = budget(offload, own, DTYPES[dtype], form, num_bytes, of_rank)
            num_bytes += expert_budget_bytes - in_store_bytes
        require_fit(num_bytes, memory, where)
        if load_format is LoadFormat.DUMMY:
            weights = draw_weights(own, device=where, dtype=DTYPES[dtype], form=form)
        else:
            to: dict[str, Any] = {"device": where, "dtype": DTYPES[dtype], "form": form, "progress": progress}
            weights = load(folder, spec, **to, rank_position=position, offloading=offloading)
        cache = None
        if offloading is not None:
            weights, cache = offloading.cache(weights, form, expert_budget_bytes, most_chosen(own), offload)
        far = position.layout.ffn_ranks and position.expert_rank is None
        staged = position.layout.pp > 1 and spec.moe_layers
        one_bytes = _one_expert_bytes(form, spec, DTYPES[dtype]) if far or staged else None
        undo.pop_all()
    if compiler is not None:
        compiler.join()
    weights = with_narrow_head(weights) if head_too else weights
    how = Arithmetic(moe_kernel, batch_invariant), ranks, one_bytes, cache, keeps_hidden, frees_windows, expert_all2all
    return WeightShard(spec, weights, TransformerOptions(cached_in, *how))


def _check_all_to_all(expert_all2all: ExpertAll2All, device: torch.device, dtype: torch.dtype) -> None:
    """Raise InvalidConfig if DeepEP is selected and not available for the device and the type of the weights."""
    if expert_all2all is ExpertAll2All.DEEPEP:
        require_deep_ep(device, dtype)


def _check_form_cuts(form: WeightFormat | None, stored: WeightFormat | None, spec: ModelSpec, layout: Layout) -> None:
    """Raise InvalidConfig if the layout cuts products in this form inside a group of the form or of the checkpoint."""
    if form is not None and not form.ordered:  # those sorted by group are divided anywhere
        kept = stored if stored is not None and form.is_stored_as(stored) else form
        check_cuts(replace(form, group=kept.group), spec, layout)


def _dtype_name(dtype: str, spec: ModelSpec) -> str:
    """Return the name of the weights' type, one of DTYPES. Raises UnsupportedModelError."""
    if dtype == "auto":
        return "float32" if spec.checkpoint_dtype == "float32" else "bfloat16"
    if dtype not in DTYPES:
        raise UnsupportedModelError(f"dtype {dtype!r} is not supported; choose one of auto, {', '.join(DTYPES)}")
    return dtype


def _spec(folder: Path, load_format: LoadFormat, max_context_tokens: int | None, *, keeps_hidden: bool) -> ModelSpec:
    """Return the model's spec; raises before any weights are read if a required MTP layer is missing."""
    spec = with_image_settings(read_spec(folder), folder).within(max_context_tokens)
    if keeps_hidden:
        require_mtp(folder, spec, load_format)
    return spec


def _one_expert_bytes(form: WeightFormat | None, spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the bytes of one expert of one layer."""
    layer = spec.layers[spec.moe_layers[0]]
    assert isinstance(layer.ffn, MoeSpec)
    expert_layer = replace(layer, ffn=replace(layer.ffn, held=(0,)), only_experts=True)
    only = replace(spec, vocab_size=0, layers=(expert_layer,))
    return _weight_bytes(form, only, dtype)


def _weight_bytes(form: WeightFormat | None, spec: ModelSpec, dtype: torch.dtype, *, head_too: bool = False) -> int:
    """Return the memory for the weights, products in `form`, in bytes.

    A quantized head counts in addition to the unquantized one that it is made from.
    """
    num_bytes = weight_bytes(spec, dtype) if form is None else bytes_in(form, spec, dtype)
    return num_bytes + (narrow_head_bytes(spec) if head_too else 0)


def _check_moe_kernel(
    moe_kernel: str, spec: ModelSpec, where: torch.device, dtype: torch.dtype, form: WeightFormat | None
) -> None:
    """Raise if the requested MoE kernel is unavailable; log a warning if the best one for a GPU is."""
    activations = torch.float32 if where.type == "cpu" else dtype
    if moe_kernel not in MOE_KERNELS:
        raise UnsupportedModelError(f"--moe-kernel {moe_kernel!r} is not known; choose one of {', '.join(MOE_KERNELS)}")
    if not spec.moe_layers:
        return
    if moe_kernel != "auto":
        reason = unavailable(moe_kernel, where, activations, form)
        if reason is not None:
            raise UnsupportedModelError(
                f"--moe-kernel {moe_kernel} is not available: {reason}; choose auto or reference"
            )
    elif where.type == "cuda":
        reason = unavailable("triton", where, activations, form)
        if reason is not None:
            fallback = "reference" if unavailable("grouped", where, activations, form) else "grouped"
            advice = "set --moe-kernel to accept this implementation explicitly"
            log.warning("moe_kernel_unavailable", kernel="triton", reason=reason, fallback=fallback, advice=advice)


def _form(quantization: str, stored: WeightFormat | None, *, exact: bool) -> WeightFormat | None:
    """Return the format of the products' weights.

    `exact`: float32 was requested, which widens a checkpoint's packed integers unless their format is requested too.
    """
    if quantization == "none":
        return None
    if quantization == "auto":
        if not exact or stored is None or stored.floating:
            return stored
        log.info("checkpoint_widened", stored_as=stored.name, loaded_as=str(torch.float32), reason=_EXACT)
        return None
    if quantization not in FORMATS:
        known = ", ".join(("auto", "none", *FORMATS))
        raise UnsupportedModelError(f"quantization {quantization!r} is not supported; choose one of {known}")
    return stored if stored is not None and stored.name == quantization else FORMATS[quantization]


def _on_device(
    form: WeightFormat | None,
    spec: ModelSpec,
    where: torch.device,
    dtype: torch.dtype,
    moe_kernel: str,
    *,
    is_explicit: bool,
) -> WeightFormat | None:
    """Return `form` in the layout that the device's kernels read.

    A checkpoint's format that no kernel reads is widened, with a log entry. Raises UnsupportedModelError if that format
    was requested explicitly, or if the model cannot run on the device.
    """
    if spec.needs_cpu and where.type != "cpu":
        raise UnsupportedModelError(
            f"a {spec.family} model is served on a CPU only, since no GPU kernel computes its attention: use "
            "--device cpu, or serve the model with another engine behind the gateway"
        )
    if form is None:
        return None
    packed: WeightFormat | None = form
    if where.type == "cuda" and form.bits == 4 and (form.group or BLOCK) % BLOCK == 0:
        packed = as_packed_for_a_gpu(replace(form, group=BLOCK), spec)
    reason = _unreadable(packed, spec, where, dtype, moe_kernel)
    if reason is None:
        return packed
    if form.is_kept and not form.floating:
        return form  # read by the kernels of a CPU, or widened before each product
    if is_explicit:
        raise UnsupportedModelError(f"--quantization {form.name} is not available: {reason}; leave it out, or use int8")
    log.info("checkpoint_widened", stored_as=form.name, loaded_as=str(dtype), reason=f"no kernel reads it: {reason}")
    return None


def _uncut(
    form: WeightFormat | None, spec: ModelSpec, position: RankPosition, dtype: str, *, is_explicit: bool
) -> WeightFormat | None:
    """Return `form`; None, with a log entry, if its inputs are sorted by group and ranks have parts of experts.

    The inputs of a part are spread over all groups, and those of each expert differently; see `divided_groups`.
    Raises UnsupportedModelError if the format was requested explicitly.
    """
    if form is None or not form.ordered or not spec.moe_layers or position.expert_cuts == 1:
        return form
    reason = (
        "with act-order (desc_act, actorder 'group') the inputs of a group lie apart, and each rank has some of those "
        "of each expert: --ep equal to the number of ranks that have experts keeps experts whole"
    )
    if is_explicit:
        raise UnsupportedModelError(f"--quantization {form.name} is not available: {reason}")
    log.info("checkpoint_widened", stored_as=form.name, loaded_as=dtype, reason=reason)
    return None


def _unreadable(
    form: WeightFormat | None, spec: ModelSpec, where: torch.device, dtype: torch.dtype, moe_kernel: str
) -> str | None:
    """Return why the device's kernels cannot read `form`; None if they can.

    `form` is None for weights that cannot be packed in the kernels' layout.
    """
    if form is None:
        return f"the number of inputs of some rows is not a multiple of {GPU_PACK}"
    if not form.is_kept:
        return f"groups of {form.group} inputs are not supported, only groups of 32, 64, 128 …"
    if not takes_products(form, spec):
        return f"the number of inputs of some rows is not a multiple of {form.pack}"
    if dtype.itemsize != 2 and (form.bits == 4 or form.is_stored_as(spec.weight_format)):
        return _EXACT
    if where.type != "cpu" and moe_kernel not in ("auto", "triton"):
        return f"only Triton's kernel supports it, but --moe-kernel is {moe_kernel}"
    return None if where.type == "cpu" else unavailable("triton", where, dtype, form)


def _cached_in(kv_dtype: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the type of a KV cache whose type is configured. Raises UnsupportedModelError if it is not supported."""
    if kv_dtype not in KV_DTYPES:
        raise UnsupportedModelError(f"--kv-dtype {kv_dtype!r} is not known; choose one of auto, {', '.join(KV_DTYPES)}")
    if kv_dtype == "bf16":
        if dtype is not torch.bfloat16:
            raise UnsupportedModelError("--kv-dtype bf16 needs --dtype bfloat16: float32 requires exact products")
        return torch.bfloat16
    if device.type != "cuda":
        raise UnsupportedModelError(
            f"--kv-dtype {kv_dtype} needs a GPU: use --kv-dtype bf16, or leave it out, or run with --device cuda"
        )
    if kv_dtype == "fp8" and torch.version.hip is None and torch.cuda.get_device_capability(device) < FLOAT8_CAPABILITY:
        raise UnsupportedModelError(
            "this GPU has no fp8, which needs compute capability 8.9: use --kv-dtype int8, or leave it out"
        )
    for attention in {layer.attention for layer in spec.layers}:
        if kv_dtype == "int8" and isinstance(attention, LatentAttentionSpec):
            widths = attention.cached_values, attention.latent_width
            if not reads_whole_numbers(*widths):
                raise UnsupportedModelError(
                    f"no kernel on this GPU supports latent rows of {widths[0]} int8 values with "
                    f"{widths[1]} not rotated: use --kv-dtype fp8, or leave it out"
                )
    return KV_DTYPES[kv_dtype]
