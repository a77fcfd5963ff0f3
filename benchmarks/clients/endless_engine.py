"""Engine process whose answers take minutes: Moiety's engine server with a scripted core.

    python -m clients.endless_engine --listen ipc:///tmp/engine.sock

For tasks that interrupt a client in the middle of an answer. The core admits, queues, and holds KV blocks and batch
slots as the one of a model does, and its steps take STEP_S.
"""

from __future__ import annotations

import argparse
import sys

from clients.scripted_answers import CHAT_TEMPLATE
from clients.scripted_server import CONTEXT_TOKENS, END_ID, END_TOKEN, ENDLESS_MODEL, model_card
from moiety_engine.scripted.link import ScriptedCore
from moiety_engine.scripted.script import Script
from moiety_engine.server.process import run_server
from moiety_engine.server.settings import ServerSettings
from moiety_text.folder import TextModel
from moiety_text.tokenizer import Tokenizer

ANSWER = "The river rises. " * 2000
STEP_S = 0.02  # a token each, so that an answer takes ten minutes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listen", required=True, help="ZeroMQ address of the engine")
    options = parser.parse_args()
    card = model_card(ENDLESS_MODEL)
    script = Script(
        tokens=tuple(Tokenizer.from_json(card.tokenizer_json).encode(ANSWER)),
        step_delay_s=STEP_S,
        max_context_tokens=CONTEXT_TOKENS,
        vocab_size=card.vocab_size,
        end_token_id=END_ID,
    )
    text = TextModel(card.tokenizer_json, CHAT_TEMPLATE, {"eos_token": END_TOKEN}, (END_ID,))
    settings = ServerSettings(model=ENDLESS_MODEL, listen=options.listen)
    sys.exit(run_server(settings, text, lambda _: ScriptedCore(script), print_line=print))


if __name__ == "__main__":
    main()
