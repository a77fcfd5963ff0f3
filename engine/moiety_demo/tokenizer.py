"""Tokenizer of the demo model: byte-level BPE whose merges start only at a space or a capital letter.

So the words of a sentence are single tokens, while a quoted word, the subject of string tasks, is read letter by
letter, and numbers digit by digit. The module owns the chat template as well.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from moiety_demo.conversation import Conversation, sample_conversation

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
# A role and its newline are one token each: they begin every turn and would otherwise take several tokens.
ROLE_TOKENS = ("system\n", "user\n", "assistant\n")
VOCAB_SIZE = 2048
SURVEY_CONVERSATIONS = 12_000

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# A digit; the separator of a list of numbers; a word with its space; a capitalized word; a mark; anything else.
PRE_TOKEN_PATTERN = r"\d|, (?=\d)| ?\p{Ll}+|\p{Lu}\p{Ll}+| ?[^\s\p{L}\d]|\s|\p{L}"

_SPACE = "\u0120"  # a space in the byte-level alphabet


def build_tokenizer(seed: int = 0) -> Tokenizer:
    """Return a tokenizer over the words of the training conversations; the same seed gives the same vocabulary."""
    rng = Random(f"tokenizer {seed}")
    words = _count_words(sample_conversation(rng) for _ in range(SURVEY_CONVERSATIONS))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_merges = VOCAB_SIZE - len(alphabet) - len(SPECIAL_TOKENS) - len(ROLE_TOKENS)
    merges = _chain_merges(words, num_merges)
    vocab = {token: i for i, token in enumerate([*alphabet, *(left + right for left, right in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in ROLE_TOKENS])
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token. Raises ValueError where the tokenizer does not have it."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no token {token!r}; build it with moiety_demo.tokenizer")
    return int(found)


def render_turn(role: str, content: str) -> str:
    """Return one message in the format of the chat template."""
    return f"{TURN_START}{role}\n{content}{TURN_END}\n"


def render_prompt(messages: Iterable[tuple[str, str]]) -> str:
    """Return (role, content) pairs in the format of the chat template, ready for the assistant's answer."""
    return "".join(render_turn(role, content) for role, content in messages) + f"{TURN_START}assistant\n"


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _count_words(conversations: Iterable[Conversation]) -> Counter[str]:
    """Count the occurrences of each mergeable word, in the byte-level alphabet."""
    pre_tokenizer, counts = _pre_tokenizer(), Counter[str]()
    for conversation in conversations:
        for text in _texts(conversation):
            counts.update(word for word, _ in pre_tokenizer.pre_tokenize_str(text) if _may_merge(word))
    return counts


def _texts(conversation: Conversation) -> Iterator[str]:
    yield conversation.system
    for task in conversation.turns:
        yield task.prompt
        yield task.answer


def _may_merge(word: str) -> bool:
    """Return whether a word may become one token: not if it starts with a small letter, which may belong to a task."""
    return len(word) > 1 and not word[0].islower()


def _chain_merges(words: Counter[str], num_merges: int) -> list[tuple[str, str]]:
    """Return merges that grow the most frequent words letter by letter from their start."""
    merges: dict[tuple[str, str], None] = {}
    for word, _ in sorted(words.items(), key=lambda item: (-item[1], item[0])):
        chain = [(word[:i], word[i]) for i in range(1, len(word))]
        if len(merges.keys() | chain) <= num_merges:
            merges.update(dict.fromkeys(chain))
    return list(merges)
