"""What a unit and a line of stock are worth. The rules are in PRICING.md."""

from datetime import date
from decimal import Decimal

from inventory.catalog import Item, Promotion

CENT = Decimal("0.01")
CLEARANCE_PERCENT = 60
VOLUME_DISCOUNTS = ((200, 18), (50, 12), (10, 5))


def volume_discount(units: int) -> int:
    """Percent off for that many units of one item."""
    for threshold, percent in VOLUME_DISCOUNTS:
        if units > threshold:
            return percent
    return 0


def promotion_discount(category: str, day: date, promotions: list[Promotion]) -> int:
    """Percent off a category on a day."""
    in_force = [
        promotion.percent
        for promotion in promotions
        if promotion.category == category and promotion.first_day <= day < promotion.last_day
    ]
    return max(in_force, default=0)


def unit_price(item: Item, day: date, promotions: list[Promotion]) -> Decimal:
    """The price of one unit in EUR."""
    if item.clearance:
        return (item.list_price * CLEARANCE_PERCENT / 100).quantize(CENT)
    volume = volume_discount(item.sellable)
    promotion = promotion_discount(item.category, day, promotions)
    price = item.list_price * (100 - volume - promotion) / 100
    return max(price.quantize(CENT), item.cost)


def line_value(item: Item, day: date, promotions: list[Promotion]) -> Decimal:
    """The value of all sellable units of an item in EUR."""
    return unit_price(item, day, promotions) * item.sellable
