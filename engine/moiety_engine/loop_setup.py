"""Construction of a step loop from a model and the configuration."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from moiety_engine.adapters.adapter_slots import AdapterSlots
from moiety_engine.cache_setup import require_recurrent_support
from moiety_engine.disk.tier import DiskTier
from moiety_engine.errors import InvalidConfig
from moiety_engine.expert_monitor import ExpertMonitor
from moiety_engine.expert_profiler import ExpertProfiler
from moiety_engine.kv_transfer.connector import connector_of
from moiety_engine.loop import EngineLoop
from moiety_engine.model.image_settings import image_rules
from moiety_engine.model_executor import DeviceOptions, ModelExecutor
from moiety_engine.moe.load_watch import ExpertLoadTracker
from moiety_engine.moe.tenants import TenantSlots
from moiety_engine.mtp_and_draft_model.draft_model import DraftModel
from moiety_engine.mtp_and_draft_model.loading import load_draft_models
from moiety_engine.pooling import decoder_embeds
from moiety_engine.request_intake import RequestIntake
from moiety_engine.runner.adapter_loading import AdapterLoader
from moiety_engine.runner.checkpoint_weights import CheckpointWeights
from moiety_engine.runner.control_messages import ControlSender
from moiety_engine.runner.expert_scaling import ExpertScaling
from moiety_engine.runner.micro_batches import cutting_of
from moiety_engine.runner.overlap import steps_overlap
from moiety_engine.runner.rebalancing import rebalancing_of
from moiety_engine.runner.sizes import Sizes, sizes_for
from moiety_engine.scheduler_setup import build_scheduler
from moiety_engine.step_reporter import StepReporter
from moiety_engine.steps.tracer import StepTracer
from moiety_engine.structured_outputs.compile_queue import GrammarCompileQueue

if TYPE_CHECKING:
    from moiety_engine.config import EngineConfig
    from moiety_engine.distribution.rank_group import RankGroup
    from moiety_engine.model.transformer import Transformer
    from moiety_engine.runner.checkpoint_weights import PartLoader
    from moiety_engine.structured_outputs.service import GrammarService


def build_loop(
    model: Transformer,
    config: EngineConfig,
    *,
    clock_ns: Callable[[], int] = time.time_ns,
    rank_group: RankGroup | None = None,
    local_ranks: int = 1,
    grammars: GrammarService | str = "it was made without a tokenizer",
    draft_models: tuple[Transformer, ...] = (),
    load_part: PartLoader | None = None,
) -> EngineLoop:
    """Build the loop and load the configured adapters.

    `rank_group` is the group of the model's other ranks; `local_ranks` ranks, including this one, run on this host.
    `grammars` is the service that compiles and steps grammars, or the reason why there is none. `draft_models` are
    the draft model that the configuration names, or the MTP layers. `load_part`: see CheckpointWeights.
    Raises AdapterError for a configured adapter that cannot be served.
    """
    if model.vision is not None and draft_models:
        raise InvalidConfig(
            "--speculate draft is not available with a model that takes images, since the draft model does not see "
            "them: use --speculate ngram, or leave out --draft-model"
        )
    require_recurrent_support(model, config)
    overlaps = steps_overlap(model, config)
    controls = ControlSender(rank_group, overlaps=overlaps, steps_in_flight=config.steps_in_flight)
    sizes = sizes_for(model, config, controls, local_ranks, draft_models=draft_models)
    draft = DraftModel(draft_models, sizes, clock_ns, controls) if draft_models else None
    compile_queue = GrammarCompileQueue(grammars, config.grammar)
    kv_connector = connector_of(config.transfer, model, rank_group, controls.send)
    adapters = _load_adapters(model, controls, config, sizes)
    tenants = None if model.experts is None else TenantSlots(rank_weights=config.rank_weights)
    model.reserve_expert_counts(sizes.max_batch_tokens, keeps_bits=config.expert_batching or config.expert_profiles)
    if model.experts is None and config.expert_batching:
        raise InvalidConfig(f"{config.name} has no experts: leave out --expert-batching")
    if model.experts is None and config.expert_profiles:
        raise InvalidConfig(f"{config.name} has no experts: leave out --expert-profiles")
    cutting = cutting_of(config, model.device.type, model.ranks)
    num_mask_words = compile_queue.num_words
    checkpoint = CheckpointWeights(config, load_part, load_draft_models)
    options = DeviceOptions(kv_connector, adapters, tenants, num_mask_words, cutting, config.sleep_folder, checkpoint)
    executor = ModelExecutor(model, draft, sizes, controls, options, overlaps=overlaps)
    experts = _monitor_experts(model, config, controls, adapters, tenants, clock_ns, load_part)
    scheduler = build_scheduler(config, model, sizes, draft)
    scheduler.encoder_work.is_encoded = executor.is_image_encoded
    disk = DiskTier(config, model, scheduler, executor.awake().kv, controls) if config.disk_cache else None
    reporter = StepReporter(StepTracer(config.traced_steps_per_s), kv_connector, adapters)
    intake = RequestIntake(
        scheduler,
        reporter,
        kv_connector,
        adapters,
        compile_queue,
        disk,
        max_context_tokens=sizes.max_context_tokens,
        clock_ns=clock_ns,
        image_rules=None
        if model.spec.vision is None
        else image_rules(model.spec.vision, Path(config.model), config.images),
        embeds=decoder_embeds(config),
    )
    return EngineLoop(executor, scheduler, intake, experts, reporter, clock_ns=clock_ns)


def _load_adapters(model: Transformer, controls: ControlSender, config: EngineConfig, sizes: Sizes) -> AdapterSlots:
    adapters = AdapterSlots(
        model,
        AdapterLoader(model, controls),
        max_bytes=sizes.adapter_bytes,
        max_slots=config.max_adapters,
        max_rank=config.max_adapter_rank,
    )
    for name, folder in config.adapters.items():
        adapters.learn(name, Path(folder))
    adapters.load_all()
    return adapters


def _monitor_experts(
    model: Transformer,
    config: EngineConfig,
    controls: ControlSender,
    adapters: AdapterSlots,
    tenants: TenantSlots | None,
    clock_ns: Callable[[], int],
    load_part: PartLoader | None,
) -> ExpertMonitor:
    watch = None
    if model.experts is not None and model.expert_counter is not None and tenants is not None:
        watch = ExpertLoadTracker(model.experts, model.expert_counter, tenants, clock_ns() / 1e9)
    rebalancing = rebalancing_of(model, config, controls, clock_ns() / 1e9)

    def before_switch() -> None:
        if rebalancing is not None:
            rebalancing.finish_move()
        adapters.read_again()

    profiler = ExpertProfiler(model.experts) if model.experts is not None and config.expert_profiles else None
    scaling = ExpertScaling(model, controls, config, before_switch, load_part)
    return ExpertMonitor(watch, rebalancing, scaling, profiler)
