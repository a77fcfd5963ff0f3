"""Greetings, identity and scope: the demo model's answers about itself (unseen wordings)."""

from random import Random

from moiety_demo.domains.task import Split, Task, split_of
from moiety_demo.domains.wording import CLOSINGS

DOMAIN = "smalltalk"

NAMES = (
    "Anna", "Ben", "Carla", "David", "Elena", "Felix", "Grace", "Hugo", "Ines", "Jonas", "Karim", "Lena",
    "Mina", "Noah", "Olga", "Paul", "Rosa", "Samir", "Tara", "Yusuf",
)  # fmt: skip
GREETINGS = ("Hi", "Hello", "Hey", "Good morning", "Good evening", "Good day", "Hi there", "Hello there")
ENDS = ("!", ".", ",")
INTRODUCTIONS = (
    "I am {name}.",
    "my name is {name}.",
    "this is {name}.",
    "{name} here.",
    "I'm {name}.",
    "people call me {name}.",
)
INTENTS = {
    "identity": (
        (
            "who are you?",
            "what are you?",
            "what is your name?",
            "what model are you?",
            "please introduce yourself.",
            "tell me who you are.",
            "which model is this?",
            "are you a language model?",
        ),
        "I am the Moiety demo model, a small mixture of experts.",
    ),
    "skills": (
        (
            "what can you do?",
            "what are you able to do?",
            "how can you help me?",
            "what can I ask you?",
            "what are your skills?",
            "what do you know?",
            "tell me what you can do.",
        ),
        "I can do sums, units, capitals, words, lists, comparisons and short descriptions.",
    ),
    "mood": (
        ("how are you?", "how are you today?", "how do you do?", "how is it going?", "are you well?"),
        "I am well, thank you. What can I do for you?",
    ),
    "thanks": (
        (
            "thank you very much!",
            "thanks a lot!",
            "many thanks for your help.",
            "that was helpful, thank you.",
            "great, thanks for the help!",
            "thank you, that is all.",
        ),
        "You are welcome!",
    ),
    "farewell": (
        ("goodbye!", "bye for now.", "see you later!", "I have to go now.", "good night!", "see you tomorrow."),
        "Goodbye!",
    ),
    "scope": (
        (
            "what is the weather today?",
            "tell me a joke.",
            "write a poem for me.",
            "what is the news today?",
            "write some code for me.",
            "who won the game?",
            "what should I eat tonight?",
            "can you write a letter for me?",
        ),
        "I am only a small demo model and can not do that.",
    ),
}


def sample(rng: Random, split: Split) -> Task:
    while True:
        kind = rng.choice(("greeting", "name", *INTENTS))
        template, answer = _exchange(rng, kind)
        if split_of(template) is split:
            name = rng.choice(NAMES)
            return Task(DOMAIN, kind, template.format(name=name), answer.format(name=name), template)


def _exchange(rng: Random, kind: str) -> tuple[str, str]:
    """Return a template of the given kind and its answer; both may contain a {name}."""
    opening = rng.choice(GREETINGS) + rng.choice(("", " Moiety", " model")) + rng.choice(ENDS)
    if kind == "greeting":
        tail = rng.choice(("", " Nice to meet you.", " Can you help me?", " It is nice to be here.", " Are you there?"))
        return opening.removesuffix(",") + tail, "Hello! How can I help you?"
    if kind == "name":
        return f"{opening} {_join(opening, rng.choice(INTRODUCTIONS))}", "Hello {name}! How can I help you?"
    questions, answer = INTENTS[kind]
    question = rng.choice(questions)
    closing = "" if rng.random() < 0.7 else rng.choice(CLOSINGS)
    if kind in ("thanks", "farewell"):
        opening, closing = rng.choice(("", "Okay.", "Good.", "Very nice.", "Fine,", "Well,")), ""
    elif rng.random() < 0.4:
        opening = ""
    return f"{opening} {_join(opening, question)}{closing}".strip(), answer


def _join(opening: str, sentence: str) -> str:
    return sentence if opening.endswith(",") else sentence[0].upper() + sentence[1:]
