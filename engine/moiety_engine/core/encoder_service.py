"""Main loop of a core that serves an encoder: execute commands and steps until shutdown."""

from __future__ import annotations

import gc

import structlog

from moiety_engine.core.link import IDLE_WAIT_MS, ServerLink
from moiety_engine.encoder.loop import EncoderLoop
from moiety_engine.messages import (
    CoreAbort,
    CoreAdapter,
    CoreExtend,
    CoreFleetService,
    CoreForget,
    CoreImages,
    CoreShutdown,
    CoreSleep,
    CoreSlept,
    CoreStep,
    CoreSubmit,
    ToCore,
)
from moiety_wire.experts import ExpertLoad, ExpertLoadQuery, ScaleExpertRanks


def serve_encoder(link: ServerLink, loop: EncoderLoop) -> None:
    """Send the hello and run until the engine server sends a shutdown."""
    loop.warm_up()
    link.send(loop.hello())
    link.send(CoreStep([], [], loop.load()))
    gc.freeze()
    gc.enable()
    structlog.get_logger().info("core_ready", family=loop.network.spec.family)
    wait_ms = 0
    while True:
        for command in link.receive(wait_ms=wait_ms):
            if isinstance(command, CoreShutdown):
                return
            _execute(link, loop, command)
        stepped = loop.step()
        outputs = loop.take_outputs()
        if outputs is not None:
            link.send(outputs)
        else:
            link.beat(loop.load)
        wait_ms = 0 if stepped else IDLE_WAIT_MS


def _execute(link: ServerLink, loop: EncoderLoop, command: ToCore) -> None:
    match command:
        case CoreSubmit():
            loop.submit(command)
        case CoreAbort():
            loop.abort(command.key, command.reason)
        case CoreSleep():
            problem = "sleep mode is not available for encoder models" if command.asleep else ""
            link.send(CoreSlept(asleep=False, problem=problem))
        case ExpertLoadQuery():
            link.send(ExpertLoad(command.query_id, 0, 0))
        case CoreExtend() | CoreImages() | CoreAdapter() | CoreForget() | CoreFleetService() | CoreShutdown():
            pass  # an encoder has no credit, no images, no adapters, no cache and no counters of tenants
        case ScaleExpertRanks():
            pass  # no gateway sends it to an engine without expert ranks
