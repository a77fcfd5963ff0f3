"""The command `moiety engine`: parses options and runs the server process. Imports no torch; the core does."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import msgspec
import structlog
import typer
import zmq

from moiety_engine.checkpoint import resolve_checkpoint
from moiety_engine.config import EngineConfig
from moiety_engine.distribution.layout import layout_of
from moiety_engine.distribution.rendezvous_address import (
    rendezvous_from,
    require_hosts_apart,
    require_private_ranks,
    require_ranks,
)
from moiety_engine.errors import CheckpointError, InvalidConfig
from moiety_engine.logs import configure_logs
from moiety_engine.option_values import image_options, same_values, serving_config
from moiety_engine.scripted.link import ScriptedCore
from moiety_engine.scripted.script import Script
from moiety_engine.scripted.text_model import scripted_text_model
from moiety_engine.server.core_link import CoreLink, ProcessCore
from moiety_engine.server.gateway_keys import read_gateway_keys, require_known_gateways
from moiety_engine.server.process import MakeCore, run_server
from moiety_engine.server.settings import ServerSettings
from moiety_options.commands import command_of
from moiety_options.engine_options import EngineOptions
from moiety_options.model_options import model_name
from moiety_text.errors import TextError
from moiety_text.folder import TextModel, read_text_model
from moiety_text.reasoning_formats import check_reasoning_format
from moiety_text.tools.registry import check_tool_format
from moiety_wire.roles import EngineRole

log = structlog.get_logger()

CORE_MODULE = "moiety_engine.core"
WRONG_USE = 2  # exit code
CANNOT_LISTEN = 1

ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def named_folders(given: list[str]) -> dict[str, str]:
    """Parse `NAME=FOLDER` options, each name once. Raises InvalidConfig."""
    found: dict[str, str] = {}
    for one in given:
        name, _, folder = one.partition("=")
        if not ADAPTER_NAME.fullmatch(name) or not folder:
            raise InvalidConfig(f"--adapter {one!r}: write NAME=FOLDER, the name of letters, digits, '.', '_' and '-'")
        if name in found:
            raise InvalidConfig(f"--adapter {name!r} is given twice: choose another name")
        if not Path(folder).is_dir():
            raise InvalidConfig(f"--adapter {name}: there is no folder {folder}")
        found[name] = str(Path(folder).resolve())
    return found


def run_engine(options: EngineOptions) -> None:
    """Run one engine, a replica of one model, for gateways to connect to.

    Prints one line of JSON when it is ready to serve; logs go to standard error. SIGTERM and Ctrl-C let running
    requests finish first. Exit codes: 0 after a stop, 2 for wrong options or a bad checkpoint, 1 if it cannot listen,
    70 if the engine core failed or hung while serving, 71 if the core could not start. Ranks other than 0 that a
    launcher started: 0 when rank 0 stops, 4 if the rank could not start, 5 if another rank failed.
    """
    configure_logs()
    try:
        if not options.allow_unauthenticated_tcp:
            keys = {"curve_key_file": options.curve_key_file}
            require_known_gateways("--listen", options.listen, **keys, gateway_keys_file=options.gateway_keys_file)
            require_known_gateways("--kv-listen", options.kv_listen, **keys)
        adapters = named_folders(options.adapter or [])
        settings = _server_settings(options, adapters)
        if options.scripted:
            _refuse_kv_options(options.role, options.kv_listen, options.disk_cache)
            text, make_core = scripted_text_model(), _scripted(_script(options))
        else:
            folder = resolve_checkpoint(options.model)
            config = serving_config(options, folder, settings.model, adapters)
            _run_worker_if_launched(config)
            text, make_core = _text_and_process(folder, config, settings)
        ending = run_server(settings, text, make_core, print_line=_print_line)
    except (CheckpointError, InvalidConfig, TextError) as exc:
        typer.echo(f"Error: {exc}", err=True)
        raise typer.Exit(WRONG_USE) from exc
    except zmq.ZMQError as exc:
        typer.echo(f"Error: cannot listen on {options.listen}: {exc}; choose another --listen", err=True)
        raise typer.Exit(CANNOT_LISTEN) from exc
    raise typer.Exit(ending)


engine = command_of(EngineOptions, run_engine)


def _server_settings(options: EngineOptions, adapters: dict[str, str]) -> ServerSettings:
    """Return the server's settings. Raises InvalidConfig, and UnknownFormat for the name of a format."""
    check_tool_format(options.tool_format)
    check_reasoning_format(options.reasoning_format)
    chosen = {
        "model": options.name or ("scripted" if options.scripted and not options.model else model_name(options.model)),
        "usage_journal": _checked(options.usage_journal),
        "drain_timeout_s": options.drain_s,
        "adapters": tuple(adapters),
        "curve_secret_key": _read_curve_key(options.curve_key_file),
        "gateway_keys_file": _checked_gateway_keys(options.gateway_keys_file, options.curve_key_file),
        "images": image_options(options),
    }
    return ServerSettings(**{**same_values(options, ServerSettings), **chosen})


def _refuse_kv_options(role: EngineRole, kv_listen: str, disk_cache: Path | None) -> None:
    if role is not EngineRole.BOTH or kv_listen or disk_cache:
        raise InvalidConfig(
            "a scripted engine has no KV: leave --role, --kv-listen and --disk-cache out, or --scripted"
        )


def _script(options: EngineOptions) -> Script:
    tokens, step_s = options.scripted_tokens_per_step, options.scripted_step_ms / 1000
    script = Script(tokens_per_step=tokens, step_delay_s=step_s, traced_steps_per_s=options.traced_steps_per_s)
    if options.max_context_tokens is not None:
        script = msgspec.structs.replace(script, max_context_tokens=options.max_context_tokens)
    if options.max_running is not None:
        script = msgspec.structs.replace(script, max_running=options.max_running)
    return script


def _scripted(script: Script) -> MakeCore:
    def make(context: zmq.Context[zmq.Socket[bytes]]) -> CoreLink:
        return ScriptedCore(script)

    return make


def _text_and_process(folder: Path, config: EngineConfig, settings: ServerSettings) -> tuple[TextModel, MakeCore]:
    def make(context: zmq.Context[zmq.Socket[bytes]]) -> CoreLink:
        silence_s = settings.core_silence_s
        return ProcessCore(context, CORE_MODULE, config, listen=settings.listen, silence_s=silence_s)

    text = read_text_model(folder)
    if text.sampling_defaults:
        advice = "used for requests that do not set them; edit generation_config.json to change them"
        log.info("sampling_defaults", **text.sampling_defaults, advice=advice)
    return text, make


def _run_worker_if_launched(config: EngineConfig) -> None:
    """Run as a worker rank where a launcher started several ranks with the same command.

    Only the first rank has a server.
    """
    layout, rendezvous = layout_of(config), rendezvous_from(os.environ)
    if rendezvous is None:
        return
    require_ranks(layout, rendezvous)
    require_hosts_apart(config.exclude_rank_after_s, rendezvous)
    require_private_ranks(rendezvous, allowed=config.allow_unauthenticated_ranks)
    if rendezvous.rank:
        from moiety_engine.core.worker import follow_until_end  # noqa: PLC0415 - imports torch

        raise typer.Exit(follow_until_end(config, rendezvous))


def _checked(usage_journal: Path | None) -> Path | None:
    if usage_journal is not None:
        try:
            usage_journal.open("ab").close()
        except OSError as exc:
            raise InvalidConfig(f"--usage-journal {usage_journal} cannot be written: {exc.strerror}") from exc
    return usage_journal


def _read_curve_key(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        key = path.read_bytes().strip()
        zmq.curve_public(key)
    except OSError as exc:
        raise InvalidConfig(f"--curve-key-file {path} cannot be read: {exc.strerror}") from exc
    except (zmq.ZMQError, ValueError) as exc:
        raise InvalidConfig(f"--curve-key-file {path} holds no secret CURVE key, 40 characters of Z85") from exc
    return key


def _checked_gateway_keys(path: Path | None, curve_key_file: Path | None) -> Path | None:
    if path is not None:
        if curve_key_file is None:
            raise InvalidConfig(f"--gateway-keys-file {path} needs --curve-key-file; set both")
        read_gateway_keys(path)
    return path


def _print_line(line: str) -> None:
    typer.echo(line)
    sys.stdout.flush()
