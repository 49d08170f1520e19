"""An order, from the reservation to the door, on one SQLite file. Run it twice:

    python examples/orders.py    # dies in the middle, as in a power cut
    python examples/orders.py    # goes on from there, and finishes

The first run charges the card and kills itself before anybody could note that down. The second run finds the order in
`orders.db`, calls the bank again under the same key, and the bank takes the money once. A third run only looks.
"""

import json
import os
import signal
from pathlib import Path

from attrs import frozen

from understudy import Context, Process, Retry, Runtime, parallel, saga, task, wait

DATABASE = "orders.db"
BANK = Path("orders.db-bank")  # The outside world: whatever is written here has happened.


@frozen
class Order:
    order_id: str
    amount: int


@task
def reserve(order_id: str) -> None:
    print(f"reserve: put aside what belongs to {order_id}")


@reserve.undo
def release(order_id: str) -> None:
    print(f"release: put it back on the shelf, {order_id} has failed")


@task(into="receipt", retry=Retry(5, first="1s"))
def charge(order_id: str, amount: int, ctx: Context) -> str:
    receipt = take_money(amount, key=ctx.key)
    print(f"charge: {receipt} (attempt {ctx.attempt})")
    if ctx.attempt == 1:
        print("... and the lights go out. Run it again.", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return receipt


@charge.undo
def refund(amount: int, ctx: Context) -> None:
    print(f"refund: {take_money(-amount, key=ctx.key)}")


@task
def pack(order_id: str) -> None:
    print(f"pack: a parcel for {order_id}")


@task
def invoice(receipt: str, amount: int) -> None:
    print(f"invoice: {amount}, paid with {receipt}")


@task
def ship(order_id: str, receipt: str) -> str:
    return f"{order_id} has arrived, {receipt}"


checkout = Process(
    "checkout",
    saga(reserve, charge, parallel(pack, invoice)),
    wait("delivered", key="order_id", timeout="72h"),
    ship,
    takes=Order,
    gives=ship,
)


def take_money(amount: int, *, key: str) -> str:
    """What a bank with idempotency keys does: the second order under a key is the first one again."""
    lines = BANK.read_text().splitlines() if BANK.exists() else []
    known = {booked["key"]: booked["receipt"] for booked in map(json.loads, lines)}
    if key in known:
        print(f"bank: {key} is {known[key]} already, and no more money moves")
        return str(known[key])
    receipt = f"receipt {len(known) + 1}"
    with BANK.open("a") as book:
        book.write(json.dumps({"key": key, "amount": amount, "receipt": receipt}) + "\n")
    return receipt


def main() -> None:
    with Runtime(DATABASE, checkout) as runtime:
        order = runtime.start(checkout, Order("order-7", 40), id="order-7")  # The same id is the same instance.
        order.wait_until(lambda state: state.is_waiting_for("delivered") or state.is_ended)
        if not order.state.is_ended:
            order.send("delivered", {"at": "the door"})

        print(order.result(timeout="30s"))
        for step in order.history:
            print(f"  {step}")


if __name__ == "__main__":
    main()
