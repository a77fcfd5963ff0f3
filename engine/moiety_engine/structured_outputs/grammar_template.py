"""Template of the grammar processes, and the roles of the processes that are forked from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_engine.structured_outputs.frames import ChildOrder, StepperOrder, TemplateReady, TrialOrder
from moiety_limited_processes.frames import send_frame
from moiety_limited_processes.processes import ForkTemplate, WorkerChild
from moiety_text.errors import TextError
from moiety_text.folder import read_tokenizer_json

if TYPE_CHECKING:
    from pathlib import Path


class GrammarTemplate(ForkTemplate[TemplateReady]):
    """Process from which all grammar processes are forked."""

    def __init__(self, folder: Path) -> None:
        """Start the process and wait until it can fork. `folder`: the checkpoint, for its tokenizer.

        Raises ValueError where there is no tokenizer, before a process starts, or where it does not support grammars;
        WorkerFailed where the process does not start.
        """
        try:
            read_tokenizer_json(folder)
        except TextError as exc:
            raise ValueError(str(exc)) from exc
        self.num_words = 0
        super().__init__(["-m", "moiety_engine.structured_outputs.worker", str(folder)], TemplateReady, self._take_size)

    def _take_size(self, ready: TemplateReady) -> None:
        if ready.problem:
            raise ValueError(ready.problem)
        self.num_words = ready.num_words


def send_role(child: WorkerChild, role: TrialOrder | StepperOrder, fds: tuple[int, ...] = ()) -> None:
    """Send a forked grammar process its role. Raises OSError."""
    send_frame(child.link, ChildOrder(role), fds)
