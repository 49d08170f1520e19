"""A shop that charges twice, found by simulation, and the same shop with the bug mended.

    understudy simulate double_charge:naive       # in this folder: fails, tells how, and draws it
    understudy simulate double_charge:careful     # holds

What keeps the second one from charging twice is one argument: `key=ctx.key`. That it never keeps the money for nothing
is due to the saga, and to `on_failure="incident"`: a charge that failed may have been made all the same, so that nobody
may give it up unasked.
"""

from attrs import frozen

from understudy import Context, Process, Retry, saga, task
from understudy.simulations import History, Simulation


class Bank:
    """What the real bank does, as far as it matters: the second order under one key is the first one again."""

    def __init__(self) -> None:
        self.charged: list[str] = []
        self.refunded: list[str] = []
        self._known: dict[str, str] = {}

    def charge(self, order_id: str, *, key: str | None = None) -> str:
        if key is not None and key in self._known:
            return self._known[key]
        self.charged.append(order_id)
        receipt = f"receipt {len(self.charged)}"
        if key is not None:
            self._known[key] = receipt
        return receipt

    def refund(self, order_id: str, *, key: str) -> None:
        if key not in self._known:
            self._known[key] = "refunded"
            self.refunded.append(order_id)


bank = Bank()


@frozen
class Order:
    order_id: str


@task(into="receipt", retry=Retry(3, first="1s"))
def charge_naively(order_id: str) -> str:
    return bank.charge(order_id)


@task(into="receipt", retry=Retry(3, first="1s"), on_failure="incident")
def charge(order_id: str, ctx: Context) -> str:
    return bank.charge(order_id, key=ctx.key)


@charge.undo(retry=Retry(5, first="1s"))
def refund(order_id: str, ctx: Context) -> None:
    bank.refund(order_id, key=ctx.key)


@task(retry=Retry(2, first="1s"))
def ship(order_id: str) -> None:
    pass


def never_charged_twice(bank: Bank) -> None:
    for order_id in bank.charged:
        times = bank.charged.count(order_id)
        assert times == 1, f"order {order_id} was charged {times} times"


def every_charge_is_shipped_or_refunded(history: History, bank: Bank) -> None:
    for order in history.values():
        order_id = order.variables["order_id"]
        if order_id in bank.charged:
            assert "ship" in order.path or order_id in bank.refunded, f"order {order_id}: {order}"


ORDERS = [Order("7"), Order("8")]

naive = Simulation(
    Process("checkout", charge_naively, ship, takes=Order),
    start=ORDERS,
    fakes={"bank": Bank},
    invariants=[never_charged_twice],
)
careful = Simulation(
    Process("checkout", saga(charge, ship), takes=Order),
    start=ORDERS,
    fakes={"bank": Bank},
    invariants=[never_charged_twice, every_charge_is_shipped_or_refunded],
)
