import unittest
from datetime import date
from decimal import Decimal

from inventory.catalog import Item, Promotion
from inventory.pricing import line_value, promotion_discount, unit_price, volume_discount

SPRING = Promotion("Cables", 10, date(2024, 3, 1), date(2024, 3, 31))


def item(**changes):
    fields = {
        "sku": "CA-1",
        "category": "Cables",
        "list_price": Decimal("20.00"),
        "cost": Decimal("9.00"),
        "on_hand": 5,
        "damaged": 0,
        "clearance": False,
    }
    return Item(**{**fields, **changes})


class PricingTest(unittest.TestCase):
    def test_few_units_have_no_volume_discount(self):
        self.assertEqual(volume_discount(5), 0)

    def test_many_units_have_a_volume_discount(self):
        self.assertEqual([volume_discount(units) for units in (20, 100, 500)], [5, 12, 18])

    def test_promotion_is_for_its_category_and_days(self):
        self.assertEqual(promotion_discount("Cables", date(2024, 3, 15), [SPRING]), 10)
        self.assertEqual(promotion_discount("Audio", date(2024, 3, 15), [SPRING]), 0)
        self.assertEqual(promotion_discount("Cables", date(2024, 4, 15), [SPRING]), 0)

    def test_damaged_units_have_no_value(self):
        self.assertEqual(line_value(item(on_hand=6, damaged=2), date(2024, 1, 1), []), Decimal("80.00"))

    def test_clearance_ignores_other_discounts(self):
        price = unit_price(item(clearance=True, on_hand=100), date(2024, 3, 15), [SPRING])
        self.assertEqual(price, Decimal("12.00"))

    def test_price_never_falls_below_cost(self):
        price = unit_price(item(cost=Decimal("19.50"), on_hand=100), date(2024, 1, 1), [])
        self.assertEqual(price, Decimal("19.50"))


if __name__ == "__main__":
    unittest.main()
