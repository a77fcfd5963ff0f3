"""Download of a model's tokenizer from the Hugging Face Hub, for gateways of engines that are not Moiety's."""

from __future__ import annotations

from pathlib import Path

from moiety_platform.cluster.errors import TokenizerNotAvailable
from moiety_text.errors import TextError
from moiety_text.folder import read_text_model

FILES = ("*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "tiktoken.model")
NO_FILES = ("original/*", "onnx/*", "*.safetensors.index.json")


def download_tokenizer(hub_id: str, folder: Path, revision: str | None) -> None:
    """Download the tokenizer, chat template and configuration of `hub_id` into `folder`, without weights.

    `revision` is a commit, tag or branch; None is the default branch. HF_TOKEN and HF_ENDPOINT of the environment
    apply. Raises TokenizerNotAvailable, also if the files are not a tokenizer that the gateway can use.
    """
    # slow to import, and only this command needs it
    import httpx  # noqa: PLC0415
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        snapshot_download(
            hub_id, revision=revision, local_dir=folder, allow_patterns=list(FILES), ignore_patterns=list(NO_FILES)
        )
        read_text_model(folder)
    except LocalEntryNotFoundError as exc:
        raise TokenizerNotAvailable(
            f"the hub is not reachable for {hub_id}: allow port 443 to it, set HF_ENDPOINT to a mirror, or use a claim "
            "with the tokenizer"
        ) from exc
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError) as exc:
        raise TokenizerNotAvailable(
            f"{hub_id} cannot be downloaded from the hub ({exc}); check the id, the revision and, for a gated model, "
            "HF_TOKEN"
        ) from exc
    except TextError as exc:
        raise TokenizerNotAvailable(f"{hub_id} has no tokenizer that the gateway can use: {exc}") from exc
