"""Tables of stored responses and conversations. Times are Unix milliseconds of the database's clock.

They hold tenants' text: `responses` has the input in `items` and the answer in `body`, `conversation_items` has both,
and `response_events` the answer. They have only what a request asked to store. Rows are deleted when they expire, when
the tenant deletes them, and with the tenant.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, ForeignKey, Index, LargeBinary, String, Text
from sqlalchemy.orm import Mapped, declared_attr, mapped_column

from moiety_platform.db.base import Base
from moiety_platform.tenants.models import ID_LENGTH

RESPONSE_ID_LENGTH = 40  # of conversations too
MAX_ITEM_ID_LENGTH = 64
MAX_MODEL_LENGTH = 512


class _StoredForProject:
    """Columns of what a project stores until it expires, with the indexes of its sums and of its expiry."""

    id: Mapped[str] = mapped_column(String(RESPONSE_ID_LENGTH), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    project_id: Mapped[str] = mapped_column(String(ID_LENGTH))

    @declared_attr.directive
    def __table_args__(cls) -> tuple[Index, ...]:  # noqa: N805  SQLAlchemy passes the class
        return Index(None, "tenant_id", "num_bytes"), Index(None, "expires_ms")  # the first covers a tenant's sums


class StoredResponse(_StoredForProject, Base):
    """One response and its input items, both as JSON.

    `previous_id` is the response that it continues. `num_items` and `total_bytes` count the whole conversation up to
    this response, so that its size can be checked without reading it. `running_until_ms` is set while a response is
    made in the background: its gateway extends it, so a time in the past means that the gateway has died.
    `conversation_id` is the conversation that it belongs to, of which it read the items before `conversation_position`.
    `num_events` is set for a streamed background response: the number of its events before the last one, once it has
    ended.
    """

    __tablename__ = "responses"

    model: Mapped[str] = mapped_column(String(MAX_MODEL_LENGTH))  # as named in the request
    previous_id: Mapped[str | None] = mapped_column(String(RESPONSE_ID_LENGTH))
    num_items: Mapped[int]
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    total_bytes: Mapped[int] = mapped_column(BigInteger)
    expires_ms: Mapped[int] = mapped_column(BigInteger)
    running_until_ms: Mapped[int | None] = mapped_column(BigInteger)
    conversation_id: Mapped[str | None] = mapped_column(String(RESPONSE_ID_LENGTH))
    conversation_position: Mapped[int | None] = mapped_column(BigInteger)
    num_events: Mapped[int | None] = mapped_column(BigInteger)
    items: Mapped[bytes] = mapped_column(LargeBinary)
    body: Mapped[bytes] = mapped_column(LargeBinary)


class StoredConversation(_StoredForProject, Base):
    """One conversation, without its items.

    `models` is a JSON list of the models that have answered in it, and `labels` the JSON object of its metadata. Items
    get the positions from `next_position` on. `num_items` and `num_bytes` count the items that are there. `locked_by`
    is the response that is being made in it, until its end or `locked_until_ms`.
    """

    __tablename__ = "conversations"

    models: Mapped[str] = mapped_column(Text)
    labels: Mapped[str] = mapped_column(Text)
    created_ms: Mapped[int] = mapped_column(BigInteger)
    expires_ms: Mapped[int] = mapped_column(BigInteger)
    next_position: Mapped[int] = mapped_column(BigInteger)
    num_items: Mapped[int]
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    locked_by: Mapped[str | None] = mapped_column(String(RESPONSE_ID_LENGTH))
    locked_until_ms: Mapped[int | None] = mapped_column(BigInteger)


class ConversationItem(Base):
    """One item of a conversation as JSON, with its id in it. It is deleted with its conversation."""

    __tablename__ = "conversation_items"
    __table_args__ = (
        Index(None, "conversation_id", "item_id", unique=True),
        Index(None, "tenant_id"),
    )

    conversation_id: Mapped[str] = mapped_column(
        String(RESPONSE_ID_LENGTH), ForeignKey("conversations.id", ondelete="CASCADE"), primary_key=True
    )
    position: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    tenant_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    item_id: Mapped[str] = mapped_column(String(MAX_ITEM_ID_LENGTH))
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    item: Mapped[bytes] = mapped_column(LargeBinary)


class StoredEvents(Base):
    """Consecutive events of a streamed background response, compressed. They are deleted with their response."""

    __tablename__ = "response_events"
    __table_args__ = (Index(None, "tenant_id"),)

    response_id: Mapped[str] = mapped_column(
        String(RESPONSE_ID_LENGTH), ForeignKey("responses.id", ondelete="CASCADE"), primary_key=True
    )
    first_number: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    tenant_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    num_events: Mapped[int]
    events: Mapped[bytes] = mapped_column(LargeBinary)
