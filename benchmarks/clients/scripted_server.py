"""Gateway on loopback with a scripted engine that reasons, calls tools and follows schemas.

    python -m clients.scripted_server --port 8100 --keys keys.json --data FOLDER

For tasks that need a capable model: agents' prompts of many thousand tokens, tool loops, reasoning.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import tokenizers
from pydantic import SecretStr

from clients.scripted_answers import CHAT_TEMPLATE, IMAGE, MARKERS, ScriptedAnswers
from moiety_platform.auth.bootstrap import BootstrapResult, ensure_bootstrap
from moiety_platform.bootstrap.composition import assembled
from moiety_platform.bootstrap.overrides import Overrides
from moiety_platform.classes.schemas import NewClass
from moiety_platform.classes.service import create_class
from moiety_platform.clock import SystemClock
from moiety_platform.db.base import Base
from moiety_platform.db.session import Database
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.listening import bind
from moiety_platform.reloading.source import SettingsSource
from moiety_platform.settings import SECTION, GatewaySettings
from moiety_wire.classes import SHIPPED
from moiety_wire.images import ImageRules
from moiety_wire.messages import ModelCard

MODEL = "scripted-agent"
ENDLESS_MODEL = "endless-agent"  # of an engine process, for clients that are interrupted
END_TOKEN, END_ID = "<|end|>", 256
PEPPER = "a pepper of a gateway that only this machine reaches"
IMAGES = ImageRules(  # the sizes of Qwen3-VL, whose placeholder has no tokens around it here
    image_token_id=257,
    start_token_id=257,
    end_token_id=257,
    patch_size=16,
    merge_size=2,
    min_pixels=1 << 16,
    max_pixels=1 << 21,
    max_images=16,
    max_bytes=20 << 20,
    max_total_bytes=48 << 20,
    max_source_pixels=36_000_000,
)
CONTEXT_TOKENS = 1_000_000  # the tokenizer has one token a byte, and agents begin with 100 KB


def model_card(model: str) -> ModelCard:
    """Return the card of a model with one token a byte and one a marker, which reasons, calls tools and sees."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([END_TOKEN, IMAGE])  # their ids are END_ID and IMAGES.image_token_id
    tokenizer.add_tokens(list(MARKERS))
    return ModelCard(
        engine_id="scripted",
        model=model,
        family="scripted",
        tokenizer_json=tokenizer.to_str(),
        chat_template=CHAT_TEMPLATE,
        special_tokens={"eos_token": END_TOKEN},
        eos_token_ids=(END_ID,),
        max_context_tokens=CONTEXT_TOKENS,
        vocab_size=tokenizer.get_vocab_size(with_added_tokens=True),
        max_num_logprobs=20,
        created_unix_s=1_700_000_000,
        dtype="float32",
        device="none",
        follows_grammars=True,
        images=IMAGES,
    )


async def serve(
    model: str, port: int, write: Callable[[BootstrapResult], object], data: Path, engines: tuple[str, ...] = ()
) -> None:
    """Serve until cancelled. `write` gets the first keys before the port listens.

    `engines` are addresses of further engines.
    """
    url, clock = f"sqlite:///{data / 'store.db'}", SystemClock()
    database = Database.open(url)
    async with database.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with database.write() as session:
        for service in SHIPPED:
            await create_class(session, NewClass.of(service))
    keys = await ensure_bootstrap(database, PEPPER.encode(), clock, reissue=True)
    assert keys is not None
    write(keys)
    settings = GatewaySettings(
        data_dir=data,
        database_url=url,
        traces_database_url=url,
        key_pepper=SecretStr(PEPPER),
        engines=engines,
        responses_store_by_default=True,  # Vercel's AI SDK refers to items, as to OpenAI's
    )
    card = model_card(model)
    engine = FakeEngineClient(card, ScriptedAnswers(card.tokenizer_json))
    source = SettingsSource.open(None, SECTION, lambda: settings, {})
    async with assembled(source, Overrides(engines=[engine], database=database)) as gateway:
        await gateway.server.serve([bind("127.0.0.1", port)])
    await database.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="name of the model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--keys", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--engine", action="append", default=[], help="address of a further engine")
    options = parser.parse_args()
    options.data.mkdir(parents=True, exist_ok=True)

    def write(keys: BootstrapResult) -> None:
        options.keys.write_text(json.dumps({"tenant_key": keys.tenant_key, "admin_key": keys.admin_key}))

    asyncio.run(serve(options.model, options.port, write, options.data, tuple(options.engine)))


if __name__ == "__main__":
    main()
