"""Performatives, addresses and the shape of a message: what can be known without a database."""

from typing import Any

import pytest

from cortex_workers.a2a.shape import refuse_no_directive, speech
from cortex_workers.errors import (
    AskNeedsDirective,
    InputTooLarge,
    InvalidArgument,
    InvalidId,
    InvalidPerformative,
    NoReceivers,
    NoSender,
    SelfAddressed,
    UnstorableText,
)
from cortex_workers.schemas.a2a import Address, Outgoing
from cortex_workers.schemas.performatives import ANSWERS, Performative, Routing, routing

DIRECTIVES = {
    "request",
    "request-when",
    "request-whenever",
    "query-if",
    "query-ref",
    "cfp",
    "propose",
    "accept-proposal",
}


def message(**values: Any) -> Outgoing:
    given: dict[str, Any] = {"sender": "sales", "receivers": ("pricing",), "content": "Hello"}
    return Outgoing(**{**given, **values})


def test_there_are_22_performatives_and_each_has_one_class() -> None:
    """g1"""
    by_class = {kind: {str(item) for item in Performative if routing(item) is kind} for kind in Routing}
    assert by_class[Routing.DIRECTIVE] == DIRECTIVES
    assert by_class[Routing.CONTROL] == {"cancel"}
    assert len(by_class[Routing.INFORMATIVE]) == 13
    assert sum(map(len, by_class.values())) == len(Performative) == 22


def test_ten_performatives_are_answers() -> None:
    """g2"""
    assert len(ANSWERS) == 10
    never = {"agree", "subscribe", "cancel", "proxy", "propagate"} | (DIRECTIVES - {"propose"})
    assert not never & {str(item) for item in ANSWERS}


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"performative": "shout"}, InvalidPerformative),
        ({"performative": "INFORM"}, InvalidPerformative),
        ({"sender": ""}, NoSender),
        ({"sender": "@elsewhere"}, NoSender),
        ({"receivers": ()}, NoReceivers),
        ({"receivers": ("",)}, NoReceivers),
        ({"receivers": ("pricing", "@elsewhere")}, NoReceivers),
        ({"receivers": tuple(f"agent-{number}" for number in range(33))}, NoReceivers),
        ({"receivers": ("sales",)}, SelfAddressed),
        ({"receivers": ("pricing", " sales ")}, SelfAddressed),
        ({"conversation_id": "conv_17"}, InvalidId),
        ({"content": "a\x00b"}, UnstorableText),
        ({"content": "x" * 2000}, InputTooLarge),
        ({"metadata": {"assignment": {}}}, InvalidArgument),
    ],
)
def test_a_malformed_message_has_an_error_of_its_own(wrong: dict[str, Any], error: type[Exception]) -> None:
    """g3"""
    with pytest.raises(error):
        speech(message(**wrong), 1024)


def test_what_is_wrong_is_found_in_one_order() -> None:
    with pytest.raises(InvalidPerformative):
        speech(message(performative="shout", sender="", receivers=()), 1024)
    with pytest.raises(NoSender):
        speech(message(sender="", receivers=()), 1024)


def test_the_same_name_elsewhere_is_somebody_else() -> None:
    """g4"""
    said = speech(message(receivers=("sales@paris", "sales@rome")), 1024)
    assert [str(item) for item in said.receivers] == ["sales@paris", "sales@rome"]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("worker", Address("worker")),
        ("worker@", Address("worker")),
        ("  worker @ node ", Address("worker", "node")),
        ("a@b@c", Address("a@b", "c")),
        ("ann@example.com@", Address("ann@example.com")),
        ("@node", Address("", "node")),
        ("", Address("")),
    ],
)
def test_an_address_is_read_from_its_last_at(text: str, address: Address) -> None:
    """g5"""
    assert Address.parse(text) == address
    assert Address.parse(str(address)) == address


def test_a_receiver_named_twice_counts_once() -> None:
    """g7"""
    said = speech(message(receivers=("b", "a", "b@", "a")), 1024)
    assert said.receivers == (Address("b"), Address("a"))


def test_only_what_makes_somebody_act_can_be_asked() -> None:
    for performative in Performative:
        if str(performative) in DIRECTIVES:
            refuse_no_directive(performative)
        else:
            with pytest.raises(AskNeedsDirective):
                refuse_no_directive(performative)
