"""Messages between agents: sent, answered, read and looked at by people and hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cortex_workers.a2a import inbox as inboxes
from cortex_workers.a2a import send as sending
from cortex_workers.a2a import tender as tenders
from cortex_workers.client.base import ClientBase, checked_limit
from cortex_workers.engine import authority
from cortex_workers.engine.validate import checked_id
from cortex_workers.errors import (
    ConversationNotFound,
    DeliveryNotFound,
    InvalidArgument,
    InvalidState,
)
from cortex_workers.schemas.a2a import (
    Address,
    Conversation,
    Delivery,
    Envelope,
    InboxItem,
    Outgoing,
    SendResult,
    Tender,
)
from cortex_workers.schemas.ids import CONVERSATION, DELIVERY
from cortex_workers.schemas.lifecycle import DeliveryState
from cortex_workers.schemas.notifications import DeliveryDue
from cortex_workers.schemas.performatives import Performative
from cortex_workers.store import a2a_conversations, a2a_deliveries, a2a_messages
from cortex_workers.store.unit import Unit


class Messages(ClientBase):
    """The verbs of those who talk with agents."""

    def send(
        self,
        to: str | Sequence[str],
        content: str,
        *,
        sender: str | None = None,
        performative: str = Performative.INFORM,
        conversation_id: str | None = None,
        in_reply_to: str | None = None,
        on_behalf_of: str | None = None,
        key: str | None = None,
        scope: str | None = None,
        principal: Any = None,
        **more: Any,
    ) -> SendResult:
        """Send a message to agents; ``request`` and its kind start runs of them. ``key`` makes it idempotent.

        The sender is the actor of this client unless named. ``in_reply_to`` answers a waiting agent: for whoever was
        asked, or (``on_behalf_of``) in his place. ``more``: ontology, protocol, language, encoding, reply_to, metadata,
        assignment, peer_node, peer_context.
        Raises: MessageRefused and its kinds, ConversationNotFound, InvalidArgument, InvalidId, InputTooLarge,
        MessagingOff, NoScope. Nothing is written by a refusal.
        """
        unknown = sorted(set(more) - set(Outgoing.model_fields))
        if unknown:
            raise InvalidArgument(f"a message has no {unknown[0]!r:.60}")
        message = Outgoing.model_construct(
            None,
            **{
                **Outgoing(sender="", receivers=()).model_dump(),
                "sender": self._sender(sender),
                "receivers": (to,) if isinstance(to, str) else tuple(to),
                "performative": performative,
                "content": content,
                "conversation_id": conversation_id,
                "in_reply_to": in_reply_to,
                "on_behalf_of": on_behalf_of,
                "key": key,
                **more,
            },
        )
        self._check_schema()
        encoded = authority.encode(self._codec, principal)
        return sending.send(self._rt, message, self._need_scope(scope), encoded, self._actor)

    def answer(
        self,
        run_id: str,
        content: str,
        *,
        call_id: str | None = None,
        sender: str | None = None,
        performative: str = Performative.INFORM,
        on_behalf_of: str | None = None,
        scope: str | None = None,
        principal: Any = None,
    ) -> SendResult:
        """Answer the question that a run waits on, in place of whoever was asked.

        Raises: RunNotFound, AskNotFound, AskSealed, InvalidArgument when it has to be said which call or for whom.
        """
        return sending.answer_run(
            self._rt,
            run_id,
            content,
            sender=self._sender(sender),
            scope=self._any_scope(scope),
            actor=self._actor,
            principal=authority.encode(self._codec, principal),
            call_id=call_id,
            performative=performative,
            on_behalf_of=on_behalf_of,
        )

    def inbox(
        self,
        owner: str,
        *,
        unread_only: bool = True,
        conversation_id: str | None = None,
        after: str | None = None,
        limit: int = 50,
        scope: str | None = None,
    ) -> list[InboxItem]:
        """What has arrived for an agent or a person in exactly this scope, oldest first; it is read from now on.

        Raises: NoScope, InvalidScope, InvalidId, InvalidArgument.
        """
        if after is not None:
            checked_id(DELIVERY, after)
        return inboxes.read(
            self._rt,
            owner,
            self._need_scope(scope),
            unread_only=unread_only,
            conversation_id=conversation_id,
            after=after,
            limit=checked_limit(limit),
        )

    def conversations(
        self,
        *,
        status: str | None = None,
        before: str | None = None,
        limit: int = 50,
        scope: str | None = None,
    ) -> list[Conversation]:
        """The newest conversations of a scope and below; ``before`` is the id of the last one seen.

        Raises: NoScope, InvalidScope, InvalidId, InvalidArgument.
        """
        if status not in (None, "open", "closed"):
            raise InvalidArgument("status is open or closed")
        if before is not None:
            checked_id(CONVERSATION, before)
        with self._rt.database.read() as unit:
            rows = a2a_conversations.page(
                unit, self._need_scope(scope), status=status, before=before, limit=checked_limit(limit)
            )
        return [a2a_conversations.to_conversation(row) for row in rows]

    def conversation(self, conversation_id: str, *, scope: str | None = None) -> Conversation:
        """One conversation.

        Raises: InvalidId, ConversationNotFound.
        """
        checked_id(CONVERSATION, conversation_id)
        with self._rt.database.read() as unit:
            row = a2a_conversations.get(unit, conversation_id, self._any_scope(scope))
        if row is None:
            raise ConversationNotFound(f"there is no conversation {conversation_id} in this scope")
        return a2a_conversations.to_conversation(row)

    def messages(
        self, conversation_id: str, *, after: int = 0, limit: int = 100, scope: str | None = None
    ) -> list[Envelope]:
        """The messages of a conversation, oldest first; ``after`` is the hop of the last one seen.

        Raises: InvalidId, ConversationNotFound.
        """
        self.conversation(conversation_id, scope=scope)
        with self._rt.database.read() as unit:
            rows = a2a_messages.of_conversation(
                unit, conversation_id, after=after, limit=checked_limit(limit)
            )
        return [a2a_messages.to_envelope(row) for row in rows]

    def tender(self, message_id: str, *, scope: str | None = None) -> Tender:
        """How a call for bids stands: who proposes, who declines, and whether all have answered. A pure read.

        Raises: InvalidId, AskNotFound.
        """
        return tenders.collect(self._rt, message_id, self._any_scope(scope))

    def deliveries(
        self,
        *,
        state: str | None = None,
        before: str | None = None,
        limit: int = 50,
        scope: str | None = None,
    ) -> list[Delivery]:
        """The newest deliveries of a scope and below; those that have ``failed`` wait for an operator.

        Raises: NoScope, InvalidScope, InvalidId, InvalidArgument.
        """
        if state is not None and state not in list(DeliveryState):
            raise InvalidArgument(f"no such state {state!r:.40}; one of {', '.join(DeliveryState)}")
        if before is not None:
            checked_id(DELIVERY, before)
        with self._rt.database.read() as unit:
            rows = a2a_deliveries.page(
                unit, self._need_scope(scope), state=state, before=before, limit=checked_limit(limit)
            )
        return [a2a_deliveries.to_delivery(row) for row in rows]

    def redrive(self, delivery_id: str, *, scope: str | None = None) -> Delivery:
        """Send a failed delivery on its way again, with a fresh count of attempts.

        Raises: InvalidId, DeliveryNotFound, InvalidState when it has not failed.
        """
        checked_id(DELIVERY, delivery_id)
        where = self._any_scope(scope)

        def work(unit: Unit) -> Delivery:
            row = a2a_deliveries.get_scoped(unit, delivery_id, where)
            if row is None:
                raise DeliveryNotFound(f"there is no delivery {delivery_id} in this scope")
            moved = a2a_deliveries.redrive(unit, delivery_id, self._actor)
            if moved is None:
                raise InvalidState(
                    f"only a failed delivery goes on its way again, this one is {row['state']}"
                )
            unit.announce(DeliveryDue(delivery_id=delivery_id, why="again"))
            return a2a_deliveries.to_delivery(moved)

        return self._rt.database.run(work)

    def _sender(self, sender: str | None) -> str:
        return sender if sender is not None else str(Address(self._actor))
