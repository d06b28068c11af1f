"""Reads the stock and the promotions."""

import csv
import json
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from pathlib import Path


@dataclass(frozen=True)
class Item:
    sku: str
    category: str
    list_price: Decimal
    cost: Decimal
    on_hand: int
    damaged: int
    clearance: bool

    @property
    def sellable(self) -> int:
        return self.on_hand - self.damaged


@dataclass(frozen=True)
class Promotion:
    category: str
    percent: int
    first_day: date
    last_day: date


def read_stock(path: Path) -> list[Item]:
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Item(
                sku=row["sku"],
                category=row["category"],
                list_price=Decimal(row["list_price"]),
                cost=Decimal(row["cost"]),
                on_hand=int(row["on_hand"]),
                damaged=int(row["damaged"]),
                clearance=row["clearance"] == "yes",
            )
            for row in csv.DictReader(file)
        ]


def read_promotions(path: Path) -> list[Promotion]:
    return [
        Promotion(
            category=entry["category"],
            percent=entry["percent"],
            first_day=date.fromisoformat(entry["first_day"]),
            last_day=date.fromisoformat(entry["last_day"]),
        )
        for entry in json.loads(path.read_text(encoding="utf-8"))
    ]
