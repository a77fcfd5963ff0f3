"""Main loop of the core: load the model, send the hello, then execute commands and steps until shutdown."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import msgspec
import structlog

from moiety_engine.checkpoint import fingerprint
from moiety_engine.config import EngineConfig
from moiety_engine.core.encoder_service import serve_encoder
from moiety_engine.core.link import IDLE_WAIT_MS, ServerLink
from moiety_engine.distribution.layout import Layout
from moiety_engine.distribution.rendezvous_address import Rendezvous
from moiety_engine.encoder.config import is_encoder
from moiety_engine.encoder.startup import load_encoder_loop
from moiety_engine.errors import OutOfMemory, SleepFileError
from moiety_engine.first_steps import FirstSteps
from moiety_engine.loop import MAX_NUM_LOGPROBS, EngineLoop
from moiety_engine.messages import (
    CoreAbort,
    CoreAdapter,
    CoreExtend,
    CoreFleetService,
    CoreForget,
    CoreHello,
    CoreImages,
    CoreShutdown,
    CoreSleep,
    CoreSlept,
    CoreState,
    CoreStep,
    CoreSubmit,
    ToCore,
)
from moiety_engine.model.families import ignored_keys
from moiety_engine.startup import load_loop
from moiety_huge_pages.process_memory import start_using_huge_pages
from moiety_kernels.cpu.compile_progress import progress as compile_progress
from moiety_wire.engine_choices import Batching, LoadFormat
from moiety_wire.experts import ExpertLoadQuery, ScaleExpertRanks

BATCHING_WAIT_MS = 2  # wait while requests wait for a batch (dynamic batching) or for others' work, such as grammars
PROGRESS_INTERVAL_S = 0.2
COMPILE_INTERVAL_S = 2.0


def serve(
    link: ServerLink, config: EngineConfig, rendezvous: Rendezvous | None = None, first_steps: FirstSteps | None = None
) -> None:
    """Run until the engine server sends a shutdown.

    `rendezvous` is the rendezvous that a launcher set for several ranks. `first_steps` records the requests whose first
    token is being computed. Raises EngineError where the model cannot be loaded.
    """
    if is_encoder(Path(config.model)):
        loop = load_encoder_loop(config, 1 if rendezvous is None else rendezvous.num_ranks)
        loop.first_steps = first_steps
        serve_encoder(link, loop)
        return
    if ignored := ignored_keys(Path(config.model)):
        advice = "check that the model computes the same without them"
        structlog.get_logger().warning("config_keys_ignored", keys=ignored, advice=advice)
    progress = _Progress(link)
    compile_progress.report = progress.compiled
    with load_loop(config, rendezvous=rendezvous, progress=progress) as generating:
        generating.first_steps = first_steps
        _serve(link, generating, config)


def _serve(link: ServerLink, loop: EngineLoop, config: EngineConfig) -> None:
    log = structlog.get_logger()
    loop.record_prefix_changes()
    loop.warm_up()
    compile_progress.report = None  # what a later request compiles does not delay the start
    link.send(msgspec.structs.replace(hello_of(loop), model_digest=digest_of_model(config)))
    link.send(CoreStep([], [], loop.load()))
    gc.freeze()  # present objects are permanent: later collections, in the middle of a step, need not scan them
    gc.enable()
    start_using_huge_pages()
    log.info("core_ready", kv_blocks=loop.load().kv_blocks_total, block_size=loop.block_size)
    wait_ms = 0
    while True:
        for command in link.receive(wait_ms=wait_ms):
            if isinstance(command, CoreShutdown):
                return
            if isinstance(command, CoreSleep):
                link.send(_change_sleep(loop, link, asleep=command.asleep))
                continue
            if isinstance(command, ExpertLoadQuery):
                link.send(loop.expert_load(command))
                continue
            execute_command(loop, command)
        stepped = loop.run_maintenance() if loop.asleep else loop.step()
        outputs = loop.take_outputs()
        if outputs is not None:
            link.send(outputs)
        else:
            link.beat(loop.load)
        balance = loop.take_expert_balance()
        if balance is not None:
            link.send(balance)
        changes = loop.take_prefix_changes()
        if changes is not None:
            link.send(changes)
        waits_for_batch = config.batching is Batching.DYNAMIC and loop.scheduler.num_waiting
        waits_soon = waits_for_batch or loop.waits_for_others
        wait_ms = 0 if stepped else BATCHING_WAIT_MS if waits_soon else IDLE_WAIT_MS


def digest_of_model(config: EngineConfig) -> str:
    """Return the fingerprint of the checkpoint for the model card; "" for random weights."""
    return "" if config.load_format is LoadFormat.DUMMY else fingerprint(Path(config.model))


def hello_of(loop: EngineLoop) -> CoreHello:
    """Return the properties of the model, except for its digest, for the engine server's model card."""
    return CoreHello(
        state=CoreState.READY,
        family=loop.executor.model.spec.family,
        max_context_tokens=loop.max_context_tokens,
        vocab_size=loop.executor.model.spec.vocab_size,
        max_num_logprobs=MAX_NUM_LOGPROBS,
        dtype=str(loop.executor.model.dtype).removeprefix("torch."),
        device=str(loop.executor.model.device),
        embedding_width=loop.executor.model.spec.hidden_size if loop.intake.embeds else 0,
        follows_grammars=loop.follows_grammars,
        hands_over=loop.intake.kv_connector.kv_sender is not None,
        kv_address=loop.intake.kv_connector.address,
        kv_host=loop.intake.kv_connector.host,
        kv_secret=loop.intake.kv_connector.secret,
        kv_ranks=loop.intake.kv_connector.ranks,
        takes_adapters=loop.intake.adapters.is_open,
        speculative_prefill=loop.scheduler.speculative_prefill.is_possible,
        exchanges_service=loop.scheduler.service_exchange is not None,
        publishes_prefixes=loop.prefix_changes is not None,
        images=loop.intake.image_rules,
        serves_spot=loop.scheduler.policy.serves_spot,
        layout=_named(loop.executor.model.ranks.rank_position.layout),
        batch_invariant=loop.executor.model.arithmetic.invariant,
    )


def _named(layout: Layout) -> str:
    """Return the numbers of ranks of a layout that differ from those of one rank, such as `tp=2 ep=2`."""
    default = Layout()
    names = ("tp", "dp", "ep", "pp", "dcp", "pcp", "ffn_ranks", "redundant_experts")
    given = {name: getattr(layout, name) for name in names}
    return " ".join(f"{name}={value}" for name, value in given.items() if value != getattr(default, name)) or "tp=1"


def execute_command(loop: EngineLoop, command: ToCore) -> None:
    """Execute a command about requests, adapters, tenants or expert ranks. The caller handles sleep and shutdown."""
    match command:
        case CoreSubmit():
            loop.submit(command)
        case CoreImages():
            loop.intake.add_images(command.key, command.images)
        case CoreExtend():
            loop.extend(command.key, command.credit_tokens, last=command.last)
        case CoreAbort():
            loop.abort(command.key, command.reason)
        case CoreAdapter():
            loop.intake.adapters.learn(command.name, Path(command.folder))
        case CoreForget():
            loop.forget_tenants(command.tenant_ids)
        case CoreFleetService():
            loop.receive_fleet_service(command.replicas)
        case ScaleExpertRanks():
            loop.scale_expert_ranks(command.num_ranks)


def _change_sleep(loop: EngineLoop, link: ServerLink, *, asleep: bool) -> CoreSlept:
    """Fall asleep or wake up, log the duration, and return the new state."""
    log = structlog.get_logger()
    begin_s = time.monotonic()
    try:
        if asleep and not loop.asleep:
            freed_bytes = loop.sleep(lambda: link.beat(loop.load))
            log.info("core_asleep", freed_bytes=freed_bytes, duration_s=round(time.monotonic() - begin_s, 3))
        elif loop.asleep and not asleep:
            loop.wake(lambda: link.beat(loop.load))
            log.info("core_awake", duration_s=round(time.monotonic() - begin_s, 3))
    except (OutOfMemory, SleepFileError) as exc:
        advice = "see the reason: free memory or disk space, then send the command again"
        if isinstance(exc, SleepFileError):
            advice = "see the reason: repair the disk and send the command again, or restart the engine"
        log.warning("core_sleep_failed", asleep=asleep, reason=str(exc), advice=advice)
        return CoreSlept(loop.asleep, str(exc))
    return CoreSlept(loop.asleep)


class _Progress:
    """Reports the loading progress to the engine server, that of weights a few times per second."""

    def __init__(self, link: ServerLink) -> None:
        self._link, self._thread = link, threading.get_ident()
        self._has_reported_compilation = False
        self._reported_at_s = 0.0

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        if now_s - self._reported_at_s >= PROGRESS_INTERVAL_S or done_bytes == total_bytes:
            self._reported_at_s = now_s
            text = f"loading weights: {done_bytes / 2**20:.0f} of {total_bytes / 2**20:.0f} MiB"
            self._link.send(CoreHello(state=CoreState.LOADING, message=text))

    def compiled(self, num_functions: int) -> None:
        """Report the compilation of CPU kernels, at most each COMPILE_INTERVAL_S.

        Functions that the compiler's thread compiles beside the weights are counted only: the link is used by one
        thread.
        """
        if threading.get_ident() != self._thread:
            return
        now_s = time.monotonic()
        if not self._has_reported_compilation or now_s - self._reported_at_s >= COMPILE_INTERVAL_S:
            self._has_reported_compilation, self._reported_at_s = True, now_s
            text = f"compiling kernels for this processor, once for each version of Moiety: {num_functions} so far"
            self._link.send(CoreHello(state=CoreState.LOADING, message=text))
