"""Errors of text.

TextError
├── ModelFilesUnusable    a model folder lacks a text file, or one of them cannot be read
├── UnusableTokenizer     a tokenizer.json that cannot be loaded, or decodes in a way not known here
├── TextNotEncodable      text that no tokenizer can take (lone surrogates)
├── TooManyTokens         text that cannot fit, found without encoding it
├── TokenOutOfRange       a token id that the tokenizer does not have
├── TemplateRefused       a chat template does not parse, refused the messages, or went over its limits
├── UnusableStop          a stop string that cannot be looked for
└── UnknownFormat         a tool-call or reasoning format that does not exist
"""


class TextError(Exception):
    """Root of this package's errors."""


class ModelFilesUnusable(TextError):
    pass


class UnusableTokenizer(TextError):
    pass


class TextNotEncodable(TextError):
    pass


class TooManyTokens(TextError):
    """The text has at least `at_least` tokens; the exact number is unknown."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"the text has at least {at_least} tokens")
        self.at_least = at_least


class TokenOutOfRange(TextError):
    pass


class TemplateRefused(TextError):
    pass


class UnusableStop(TextError):
    pass


class UnknownFormat(TextError):
    pass
