"""The agents and tools of the demo: what a team would write, on a model that follows a script.

Workers load it as ``CORTEX_HOST=cortex_workers.cli.demo.host:host``.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from cortex_workers.cli.demo import world
from cortex_workers.cli.demo.world import World
from cortex_workers.host import DidNotHappen, Happened, Host, LookupAnswer, ToolContext
from cortex_workers.llm.scripted import ScriptedModel

BANK_TIMEOUT = timedelta(seconds=4)
"""How long the bank may take. A lookup's "not paid" is believed this long after the dead worker's lease."""

TO_BANK, FROM_BANK = "to-bank", "from-bank"

ORDERS = {"17": {"item": "espresso machine", "paid_cents": 18_900, "status": "came back unopened"}}
INVOICES = {"4711": 125_000, "4712": 64_000}
VOUCHER_CENTS = 500

host = Host()


@host.tool(retry_safe=True, effects="none")
def find_order(order_id: str, ctx: ToolContext) -> dict[str, Any]:
    """Look an order up."""
    order = ORDERS[order_id]
    World.from_environment().note(world.CALLED, ctx, tool="find_order", arguments=[order_id], result=order)
    return order


@host.tool(needs_approval=True, timeout=BANK_TIMEOUT)
def refund(order_id: str, amount_cents: int, ctx: ToolContext) -> str:
    """Pay the price of an order back."""
    return _pay(ctx, "refund", f"refund of order {order_id}", amount_cents)


@host.tool(timeout=BANK_TIMEOUT)
def pay_invoice(invoice: str, amount_cents: int, ctx: ToolContext) -> str:
    """Pay a supplier's invoice."""
    return _pay(ctx, "pay_invoice", f"invoice {invoice}", amount_cents)


@host.tool(timeout=BANK_TIMEOUT)
def send_voucher(customer: str, amount_cents: int, ctx: ToolContext) -> str:
    """Send a voucher to a customer."""
    return _pay(ctx, "send_voucher", f"voucher for {customer}", amount_cents)


@refund.lookup
@pay_invoice.lookup
@send_voucher.lookup
def ask_the_bank(ctx: ToolContext) -> LookupAnswer:
    """Ask the bank whether it has paid under this call's key."""
    there = World.from_environment()
    receipt = there.receipt(ctx.idempotency_key)
    there.note(world.LOOKED_UP, ctx, receipt=receipt)
    return DidNotHappen() if receipt is None else Happened(f"paid, receipt {receipt}")


def _pay(ctx: ToolContext, tool: str, what: str, cents: int) -> str:
    there = World.from_environment()
    there.note(world.CALLED, ctx, tool=tool, what=what, cents=cents, attempt=ctx.attempt)
    there.cross(TO_BANK)
    receipt = there.pay(ctx, what, cents)
    there.cross(FROM_BANK)
    return f"paid, receipt {receipt}"


def _payment(invoice: str) -> dict[str, Any]:
    call = {"tool": "pay_invoice", "args": {"invoice": invoice, "amount_cents": INVOICES[invoice]}}
    return {
        "input_contains": invoice,
        "turns": [{"call": [call]}, {"say": f"Invoice {invoice} is settled: {{last_result}}."}],
    }


SUPPORT = [
    {"say": "Let me look at that order.", "call": [{"tool": "find_order", "args": {"order_id": "17"}}]},
    {"call": [{"tool": "refund", "args": {"order_id": "17", "amount_cents": 18_900}}]},
    {"say": "Your 189.00 for order 17 are on their way: {last_result}."},
]
_OTHERWISE = {"default": True, "turns": [{"say": f"I can pay {' and '.join(INVOICES)}."}]}
PAYMENTS = {"match": [*(_payment(invoice) for invoice in INVOICES), _OTHERWISE]}
VOUCHERS = [
    {"call": [{"tool": "send_voucher", "args": {"customer": "{input}", "amount_cents": VOUCHER_CENTS}}]},
    {"say": "Sent to {input}: {last_result}."},
]

host.agent(
    "support",
    model=ScriptedModel(SUPPORT, keep_requests=10),
    instructions="Help customers of the shop. Refund what came back.",
    tools=[find_order, refund],
)
host.agent(
    "payments",
    model=ScriptedModel(PAYMENTS, keep_requests=10),
    instructions="Pay invoices, each once.",
    tools=[pay_invoice],
)
host.agent(
    "vouchers",
    model=ScriptedModel(VOUCHERS, keep_requests=10),
    instructions="Send a voucher to the customer you are told.",
    tools=[send_voucher],
)
