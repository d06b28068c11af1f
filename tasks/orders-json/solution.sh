#!/usr/bin/env bash
# Keeps the last revision of each order, walks its items to any depth, and books to merged customers.
set -euo pipefail
mkdir -p outputs
python3 - <<'PYTHON'
import json
from collections import Counter, defaultdict
from decimal import Decimal
from pathlib import Path

WANTED = "KB-2041"
SMALLEST = {"EUR": Decimal("0.01"), "USD": Decimal("0.01"), "GBP": Decimal("0.01"), "JPY": Decimal(1)}


def load(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


def pieces(item, times):
    """Yields (units, unit price) for the wanted product in so many of an item."""
    if item["sku"].strip().upper() == WANTED:
        yield times, item["unit_price"]
    for component in item.get("components", []):
        yield from pieces(component, times * int(component["quantity"]))


def owner(customer_id):
    while customers[customer_id]["merged_into"] is not None:
        customer_id = customers[customer_id]["merged_into"]
    return customer_id


customers = {customer["id"]: customer for customer in load("data/customers.json")["customers"]}
orders = {}
for path in sorted(Path("data").glob("orders-*.json")):
    for order in load(path)["orders"]:
        known = orders.get(order["order_id"])
        if known is None or order["revision"] > known["revision"]:
            orders[order["order_id"]] = order

units = Counter()
spend = defaultdict(Decimal)
for order in orders.values():
    customer = owner(order["customer"]["id"])
    if order["status"] not in ("completed", "shipped") or customers[customer]["internal"]:
        continue
    payment = order["payment"]
    rate = Decimal(payment["eur_rate"]) * SMALLEST[payment["currency"]]
    for item in order["items"]:
        kept = int(item["quantity"]) - (item.get("returned") or 0)
        for count, price in pieces(item, kept):
            units[customer] += count
            spend[customer] += count * price * rate

buyers = [customer for customer in units if units[customer] > 0]
ranking = sorted(buyers, key=lambda customer: (-spend[customer], customer))
answer = {
    "customers": len(buyers),
    "units": sum(units.values()),
    "spend_eur": float(sum(spend.values())),
    "top_customers": [{"id": customer, "spend_eur": float(spend[customer])} for customer in ranking[:5]],
}
with open("outputs/answer.json", "w") as file:
    json.dump(answer, file, indent=2)
PYTHON
