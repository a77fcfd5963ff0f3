"""Request header with tags, by which usage is grouped: `x-moiety-tags: team=search, feature=chat`."""

TAGS_HEADER = "x-moiety-tags"
MAX_TAGS = 8
MAX_TAG_NAME_CHARS = 32
MAX_TAG_VALUE_CHARS = 64

TAG_NAME = f"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{MAX_TAG_NAME_CHARS - 1}}}"
TAG_PATTERN = f"^{TAG_NAME}=.{{1,{MAX_TAG_VALUE_CHARS}}}$"  # of printable characters

_TAG = f"{TAG_NAME}=[!-+.-~-]{{1,{MAX_TAG_VALUE_CHARS}}}"
TAGS_PATTERN = f"^{_TAG}(?:[ \\t]*,[ \\t]*{_TAG}){{0,{MAX_TAGS - 1}}}$"  # of the header
