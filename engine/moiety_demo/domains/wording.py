"""Wording of tasks: an opening, a question of the domain, a closing. Knows no domain's facts."""

from collections.abc import Sequence
from random import Random

from moiety_demo.domains.task import Split, split_of

OPENINGS = (
    "Hi! ",
    "Hello. ",
    "A quick question: ",
    "Please help me: ",
    "Next task: ",
    "Tell me: ",
    "Question: ",
    "Another one: ",
    "I have a question. ",
    "Here is a task. ",
)
CLOSINGS = (" Thank you.", " Thanks!", " Please be brief.", " Just the answer, please.")
PLAIN_OPENING = 0.5
PLAIN_CLOSING = 0.6


def compose_wording(opening: str, question: str, closing: str) -> str:
    """Return the whole template; the question is capitalized where it starts a sentence."""
    if not opening or opening.endswith((". ", "! ")):
        question = question[0].upper() + question[1:]
    return opening + question + closing


def choose_wording(rng: Random, questions: Sequence[str], split: Split | None = None) -> str:
    """Return a template for one of `questions`; with `split`, one whose own text belongs to that split."""
    while True:
        opening = "" if rng.random() < PLAIN_OPENING else rng.choice(OPENINGS)
        closing = "" if rng.random() < PLAIN_CLOSING else rng.choice(CLOSINGS)
        template = compose_wording(opening, rng.choice(questions), closing)
        if split is None or split_of(template) is split:
            return template
