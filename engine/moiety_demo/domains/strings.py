"""Spelling tasks on quoted words of 3 to 7 letters, most of them invented (unseen words)."""

from collections.abc import Callable
from random import Random

from moiety_demo.domains.task import Split, Task, split_of
from moiety_demo.domains.wording import choose_wording

DOMAIN = "strings"
MIN_LETTERS = 3
MAX_LETTERS = 7
VOWELS = "aeiou"
CONSONANTS = "bcdfghjklmnpqrstvwxyz"

WORDS = (  # noqa: SIM905 - quotes around 150 words would bury them
    "apple bread chair table house river stone cloud green yellow purple orange silver garden window "
    "bottle candle mirror pencil paper school music dance winter summer spring autumn friend father "
    "mother sister brother doctor farmer baker sailor tiger horse mouse snake eagle panda zebra lemon "
    "grape mango peach cherry onion carrot potato tomato butter cheese honey sugar salt pepper rice "
    "train plane boat bridge road street market forest ocean island desert valley hill lake moon star "
    "planet sun rain snow wind storm fire water earth gold iron copper glass cotton wool leather door "
    "floor roof wall lamp clock phone radio camera book story letter number circle square happy quiet "
    "small large quick slow warm cold light dark early late fresh sweet sharp smooth round open close "
    "jump walk talk sing laugh smile think dream build write read learn teach help give take bring send"
).split()

QUESTIONS = {
    "reverse": (
        "reverse the word {word}.",
        "write {word} backwards.",
        "spell {word} backwards.",
        "what is {word} reversed?",
        "turn the letters of {word} around.",
    ),
    "uppercase": (
        "write {word} in capital letters.",
        "convert {word} to upper case.",
        "what is {word} in upper case?",
        "put the word {word} in capitals.",
    ),
    "spell": (
        "spell the word {word}.",
        "spell {word} with dashes.",
        "spell out {word}.",
    ),
    "length": (
        "how many letters does {word} have?",
        "count the letters in {word}.",
        "how many letters are in the word {word}?",
        "how long is the word {word}?",
    ),
    "first": (
        "what is the first letter of {word}?",
        "give the first letter of the word {word}.",
        "which letter does {word} start with?",
    ),
    "last": (
        "what is the last letter of {word}?",
        "give the last letter of the word {word}.",
        "which letter does {word} end with?",
    ),
    "second": (
        "what is the second letter of {word}?",
        "give the second letter of the word {word}.",
        "which letter is second in {word}?",
    ),
}

ANSWERS: dict[str, Callable[[str], str]] = {
    "reverse": lambda word: word[::-1],
    "uppercase": lambda word: word.upper(),
    "spell": "-".join,
    "length": lambda word: str(len(word)),
    "first": lambda word: word[0],
    "last": lambda word: word[-1],
    "second": lambda word: word[1],
}


def sample(rng: Random, split: Split) -> Task:
    kind = rng.choices(tuple(QUESTIONS), (3, 1.5, 1.5, 1.2, 1, 1, 1))[0]
    while True:
        word = rng.choice(WORDS) if rng.random() < 0.15 else _invent(rng)
        key = f"word {word}"
        if split_of(key) is split:
            break
    prompt = choose_wording(rng, QUESTIONS[kind]).format(word=f'"{word}"')
    return Task(DOMAIN, kind, prompt, ANSWERS[kind](word), key)


def _invent(rng: Random) -> str:
    """Return invented letters, with vowels about as frequent as in words, and letters sometimes repeated."""
    letters: list[str] = []
    for _ in range(rng.randint(MIN_LETTERS, MAX_LETTERS)):
        if letters and rng.random() < 0.15:
            letters.append(rng.choice(letters))
        else:
            letters.append(rng.choice(VOWELS if rng.random() < 0.4 else CONSONANTS))
    return "".join(letters)
