"""`python -m moiety_engine.structured_outputs.worker FOLDER FD`: template of grammar processes, started by a core.

The template reads the checkpoint's tokenizer once and then forks children on request; each gets a socket to the core.
It never receives a grammar, so no client can affect it. It has one thread, which makes forking safe. It ends when the
core ends, and kills its children.
"""

from __future__ import annotations

import signal
import socket
import sys
from functools import partial
from pathlib import Path

from moiety_engine.structured_outputs.compiler import GrammarCompiler
from moiety_engine.structured_outputs.frames import TemplateReady
from moiety_engine.structured_outputs.worker_child import run_child
from moiety_limited_processes.frames import send_frame
from moiety_limited_processes.template import serve_template
from moiety_text.errors import TextError


def main() -> int:
    folder, fd = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the core decides when to end
    control = socket.socket(fileno=int(fd))
    try:
        compiler = GrammarCompiler.read(Path(folder))
    except (ValueError, TextError) as exc:
        send_frame(control, TemplateReady(0, str(exc)))
        return 0
    serve_template(control, TemplateReady(compiler.num_words, ""), partial(run_child, compiler=compiler))
    return 0


if __name__ == "__main__":
    sys.exit(main())
