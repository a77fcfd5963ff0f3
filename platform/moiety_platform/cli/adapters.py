"""Command `moiety adapter add`, which uploads an adapter in parts."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from moiety_platform.cli.admin_command import Admin, admin_command
from moiety_platform.cli.object_names import warn_of_unknown_models
from moiety_platform.resources.paths import path_of

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PART_BYTES = 512 * 1024


@admin_command
def add_adapter(
    admin: Admin,
    tenant: Annotated[str, typer.Argument(help="Name or id of the tenant that may use the adapter.")],
    model: Annotated[str, typer.Argument(help="Name of the served model that the adapter was trained for.")],
    name: Annotated[str, typer.Argument(help="Name of the adapter. Clients request the model MODEL:NAME.")],
    folder: Annotated[
        Path | None, typer.Argument(help=f"Folder with {CONFIG} and {TENSORS}.", exists=True, file_okay=False)
    ] = None,
    engine_adapter: Annotated[
        str | None,
        typer.Option(
            help="NAME of an adapter that engines loaded by --adapter NAME=FOLDER, instead of a folder to upload."
        ),
    ] = None,
) -> None:
    """Upload an adapter for a tenant, or assign it one that the engines loaded. No other tenant can use it."""
    if (folder is None) == (engine_adapter is None):
        raise typer.BadParameter("give either a folder or --engine-adapter")
    for file in (CONFIG, TENSORS):
        if folder is not None and not (folder / file).is_file():
            raise typer.BadParameter(f"{folder} has no {file}; save the adapter with PEFT's save_pretrained")
    warn_of_unknown_models(admin.client, [model])
    new: dict[str, Any] = {"tenant_id": admin.client.find_tenant(tenant)["id"], "model": model, "name": name}
    if folder is None:
        admin.show_row(admin.client.call("POST", "/adapters", new | {"engine_adapter": engine_adapter}))
        return
    made = admin.client.call("POST", "/adapters", new | {"config": (folder / CONFIG).read_text(encoding="utf-8")})
    path = path_of("adapters", made["id"])
    try:
        _upload(admin, path, folder / TENSORS)
        published = admin.client.call("POST", f"{path}/publish")
    except BaseException:  # frees the name for another attempt
        admin.client.call("DELETE", path)
        raise
    admin.show_row(published)


def _upload(admin: Admin, path: str, file: Path) -> None:
    start, console = 0, Console(stderr=True)
    with file.open("rb") as content, Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("uploading", total=file.stat().st_size)
        while data := content.read(PART_BYTES):
            body = {"start": start, "data": base64.b64encode(data).decode("ascii")}
            admin.client.call("POST", f"{path}/parts", body)
            start += len(data)
            progress.update(bar, completed=start)
