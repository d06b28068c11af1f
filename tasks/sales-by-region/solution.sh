#!/usr/bin/env bash
# Reads each record once, then books every sale and every refund to the region and quarter of the sale.
set -euo pipefail
mkdir -p outputs
python3 - <<'PYTHON'
import csv
import json
from decimal import Decimal

REGIONS = ["North", "South", "East", "West"]
QUARTERS = ["Q1", "Q2", "Q3", "Q4"]


def year_and_month(text):
    if "/" in text:
        _, month, year = text.split("/")
    else:
        year, month, _ = text.split("-")
    return int(year), int(month)


def amount(record):
    return int(record["quantity"]) * Decimal(record["unit_price"].replace(",", ""))


def cell(sale):
    _, month = year_and_month(sale["date"])
    return sale["region"].strip().capitalize(), QUARTERS[(month - 1) // 3]


with open("data/sales.csv", newline="", encoding="utf-8") as file:
    records = {row["record_id"]: row for row in csv.DictReader(file)}

final = [record for record in records.values() if record["status"] != "void"]
sales = {
    record["record_id"]: record
    for record in final
    if record["kind"] == "sale" and year_and_month(record["date"])[0] == 2024
}
refunds = [record for record in final if record["kind"] == "refund" and record["refund_of"] in sales]

net = {(region, quarter): Decimal(0) for region in REGIONS for quarter in QUARTERS}
for sale in sales.values():
    net[cell(sale)] += amount(sale)
for refund in refunds:
    net[cell(sales[refund["refund_of"]])] -= amount(refund)

best = max(net, key=net.get)
answer = {
    "net_revenue": {
        region: {quarter: float(net[region, quarter]) for quarter in QUARTERS} for region in REGIONS
    },
    "refunded": float(sum(map(amount, refunds))),
    "best": {"region": best[0], "quarter": best[1]},
}
with open("outputs/answer.json", "w") as file:
    json.dump(answer, file, indent=2)
PYTHON
