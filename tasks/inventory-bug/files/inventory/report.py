"""Prints the value of the stock by category.

python3 -m inventory.report [--as-of YYYY-MM-DD]
"""

import argparse
from collections import Counter
from datetime import date
from decimal import Decimal
from pathlib import Path

from inventory.catalog import read_promotions, read_stock
from inventory.pricing import line_value

DATA = Path(__file__).parent.parent / "data"


def main() -> None:
    parser = argparse.ArgumentParser(description="Value the stock.")
    parser.add_argument("--as-of", type=date.fromisoformat, default=date.today(), metavar="YYYY-MM-DD")
    day = parser.parse_args().as_of
    promotions = read_promotions(DATA / "promotions.json")

    lines: Counter[str] = Counter()
    units: Counter[str] = Counter()
    value: dict[str, Decimal] = {}
    at_list = Decimal(0)
    for item in read_stock(DATA / "stock.csv"):
        lines[item.category] += 1
        units[item.category] += item.sellable
        value[item.category] = value.get(item.category, Decimal(0)) + line_value(item, day, promotions)
        at_list += item.list_price * item.sellable

    print(f"Stock valuation as of {day}\n")
    print(f"{'Category':<16}{'Lines':>8}{'Units':>10}{'Value EUR':>18}")
    for category in sorted(value):
        print(f"{category:<16}{lines[category]:>8,}{units[category]:>10,}{value[category]:>18,.2f}")
    print()
    print(f"{'Total at list':<34}{at_list:>18,.2f}")
    print(f"{'Total value':<34}{sum(value.values()):>18,.2f}")


if __name__ == "__main__":
    main()
