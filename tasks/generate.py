"""Makes the data and the expected answers of the bundled tasks.

    python3 tasks/generate.py [DIRECTORY]

Writes `<task>/files/data/*` and `<task>/expected.json` below DIRECTORY (default: the folder of this
file) and leaves everything else there alone: instructions, solutions and the source code that
`inventory-bug` ships are written by hand.

Invariants:

- Every run writes the same bytes: each task has its own seeded generator, no clock is read, and
  only integers are drawn. `hr.db` is the exception: SQLite stamps its own version into the file,
  so there the same statements (`iterdump`) are promised, not the same bytes.
- An expected answer is tallied while the records are made, before they are spelled untidily into a
  file. Nothing is read back, so an answer owes nothing to a parser, and `solution.sh`, which does
  parse, is an independent check of it.
"""

from __future__ import annotations

import csv
import io
import json
import sqlite3
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from fractions import Fraction
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

Json = Any

FIRST_NAMES = ("Aino", "Bao", "Carla", "Dmitri", "Esi", "Farid", "Greta", "Hugo", "Ines", "Jamal")
LAST_NAMES = ("Abara", "Brandt", "Castillo", "Dufour", "Eriksen", "Fontana", "Gupta", "Horvat", "Ivanov")


def chance(rng: Random, percent: int) -> bool:
    return rng.randrange(100) < percent


def pick_day(rng: Random, first: date, last: date) -> date:
    return first + timedelta(days=rng.randint(0, (last - first).days))


def draw_name(rng: Random) -> str:
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"


def write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    write_text(path, buffer.getvalue())


# --- sales-by-region ---------------------------------------------------------------------------

REGIONS = ("North", "South", "East", "West")
SHOPPERS = (
    "Harper, Boyd & Sons",
    "Nordlys AS",
    "Café Métro, SARL",
    'The "Corner" Shop',
    "Okafor Trading",
    "Lindqvist, Berg och Partner",
    "Delgado Hermanos",
    "Ito & Co.",
    "Weiss GmbH",
    'Miller, "Bud" & Daughter',
    "Papadakis Bros",
    "Fjord Supply, Ltd.",
)
PRODUCTS = (
    ("Cable, USB-C, 2 m", 1290),
    ("Desk lamp", 4950),
    ('Monitor 27", matte', 32900),
    ("Standing desk, oak", 124900),
    ("Office chair", 21999),
    ("Laptop stand", 3995),
    ("Rack server, 2U", 389900),
    ("Headset, wireless", 11950),
    ("Whiteboard 120x90", 8740),
    ("Espresso machine", 174500),
)
NOTES = (
    "",
    "",
    "",
    "gift wrap",
    "Deliver to back door, ring twice",
    'Customer said "no rush"',
    "Left at reception,\nsigned by J. Ortiz",
    "invoice by post\n\nsecond copy to accounting, please",
)


@dataclass(frozen=True)
class Sale:
    day: date
    region: str
    customer: str
    product: str
    quantity: int
    cents: int
    void: bool


@dataclass
class SalesLedger:
    """The rows of the file as they grow, and beside them the answer, in cents."""

    rng: Random
    rows: list[list[str]] = field(default_factory=list)
    net: dict[str, Counter[str]] = field(default_factory=lambda: {region: Counter() for region in REGIONS})
    refunded: int = 0

    def add_row(self, kind: str, refund_of: str, sale: Sale, region: str) -> str:
        record_id = f"R{100000 + 7 * len(self.rows)}"
        note = self.rng.choice(NOTES)
        spellings = 2 if chance(self.rng, 3) else 1
        for _ in range(spellings):
            when, price = spell_day(self.rng, sale.day), spell_cents(self.rng, sale.cents)
            status = "void" if sale.void else "final"
            what = [sale.customer, sale.product, str(sale.quantity), price, status, note]
            self.rows.append([record_id, kind, refund_of, when, spell_region(self.rng, region), *what])
        return record_id

    def add_sale(self, sale: Sale) -> str:
        if counts(sale):
            self.net[sale.region][quarter(sale.day)] += sale.quantity * sale.cents
        return self.add_row("sale", "", sale, sale.region)

    def add_refund(self, sale: Sale, sale_id: str) -> None:
        refund = Sale(
            day=sale.day + timedelta(days=self.rng.randint(3, 110)),
            region=self.rng.choice(("", "", *REGIONS)),
            customer=sale.customer,
            product=sale.product,
            quantity=self.rng.randint(1, sale.quantity),
            cents=sale.cents * self.rng.choice((10, 10, 9)) // 10,
            void=chance(self.rng, 8),
        )
        if counts(sale) and not refund.void:
            self.net[sale.region][quarter(sale.day)] -= refund.quantity * refund.cents
            self.refunded += refund.quantity * refund.cents
        self.add_row("refund", sale_id, refund, refund.region)


def counts(sale: Sale) -> bool:
    return sale.day.year == 2024 and not sale.void


def quarter(day: date) -> str:
    return f"Q{(day.month + 2) // 3}"


def spell_day(rng: Random, day: date) -> str:
    return day.strftime("%d/%m/%Y") if chance(rng, 30) else day.isoformat()


def spell_cents(rng: Random, cents: int) -> str:
    separator = "," if chance(rng, 70) else ""
    return f"{cents // 100:{separator}}.{cents % 100:02d}"


def spell_region(rng: Random, region: str) -> str:
    if not region or chance(rng, 70):
        return region
    return rng.choice((region.lower(), region.upper(), f" {region}", f"{region.lower()} "))


def draw_sale(rng: Random) -> Sale:
    product, cents = rng.choice(PRODUCTS)
    return Sale(
        day=pick_day(rng, date(2023, 11, 15), date(2025, 1, 20)),
        region=rng.choice(("North", "North", "South", "East", "East", "East", "West")),
        customer=rng.choice(SHOPPERS),
        product=product,
        quantity=rng.randint(1, 3) if cents > 100000 else rng.randint(1, 12),
        cents=cents - rng.choice((0, 0, 0, 5, 50)),
        void=chance(rng, 5),
    )


def make_sales(files: Path, rng: Random) -> Json:
    ledger = SalesLedger(rng)
    for _ in range(2700):
        sale = draw_sale(rng)
        sale_id = ledger.add_sale(sale)
        if chance(rng, 2):
            ledger.add_sale(sale)
        if chance(rng, 12):
            ledger.add_refund(sale, sale_id)
    rng.shuffle(ledger.rows)
    header = "record_id,kind,refund_of,date,region,customer,product,quantity,unit_price,status,note"
    write_csv(files / "data/sales.csv", header.split(","), ledger.rows)
    cells = [(cents, region, name) for region in REGIONS for name, cents in ledger.net[region].items()]
    _, best_region, best_quarter = max(cells)
    return {
        "net_revenue": {
            region: {name: ledger.net[region][name] / 100 for name in ("Q1", "Q2", "Q3", "Q4")} for region in REGIONS
        },
        "refunded": ledger.refunded / 100,
        "best": {"region": best_region, "quarter": best_quarter},
    }


# --- failed-logins -----------------------------------------------------------------------------

LOG_FIRST, LOG_LAST = datetime(2024, 5, 4), datetime(2024, 5, 15)
WINDOW_FIRST, WINDOW_LAST = datetime(2024, 5, 6), datetime(2024, 5, 13)
CLOCK_OFFSET = timedelta(hours=2)
# Ties where text order and numeric order disagree, one of them across the border of the top ten.
ATTACKERS = (
    ("203.0.113.77", 163),
    ("203.0.113.9", 163),
    ("2001:db8:5::1f", 184),
    ("10.200.1.5", 171),
    ("198.51.100.201", 150),
    ("192.0.2.130", 142),
    ("192.0.2.14", 142),
    ("203.0.113.250", 131),
    ("2001:db8:77::c0:1", 120),
    ("198.51.100.9", 118),
    ("198.51.100.44", 118),
    ("203.0.113.8", 118),
    ("10.2.0.17", 97),
)
SCANNERS = tuple(f"198.18.{block}.{host}" for block in (4, 41, 140) for host in range(3, 240, 13))
MONITORS = ("10.20.3.4", "10.20.250.11")
BAIT = ("198.51.100.250", "203.0.113.199", "192.0.2.1")
KNOWN_USERS = ("root", "deploy", "backup", "amara", "jonas", "mei")
UNKNOWN_USERS = ("admin", "test", "oracle", "ubuntu", "git", "", "guest user", "pi", "from", "postgres")


@dataclass
class AuthLog:
    """Lines of a syslog with their UTC time, and the tally of the attempts that count."""

    rng: Random
    lines: list[tuple[datetime, int, str]] = field(default_factory=list)
    per_address: Counter[str] = field(default_factory=Counter)
    on_unknown_users: int = 0

    def write(self, when: datetime, host: str, tag: str, message: str) -> None:
        local = when + CLOCK_OFFSET
        stamp = f"May {local.day:2d} {local:%H:%M:%S}"
        self.lines.append((when, len(self.lines), f"{stamp} {host} {tag}: {message}"))

    def tag(self, program: str) -> str:
        return f"{program}[{self.rng.randint(900, 32000)}]"

    def tally(self, address: str, attempts: int, known: bool) -> None:
        self.per_address[address] += attempts
        self.on_unknown_users += 0 if known else attempts

    def fail(self, when: datetime, host: str, address: str, at_most: int) -> tuple[int, bool]:
        """Writes one to `at_most` failed password attempts; returns how many, and if the user is known."""
        known = chance(self.rng, 55)
        user = self.rng.choice(KNOWN_USERS) if known else "invalid user " + self.unknown_user()
        shown = f"::ffff:{address}" if "." in address and chance(self.rng, 12) else address
        port, tag = self.rng.randint(30000, 65000), self.tag("sshd")
        message = f"Failed password for {user} from {shown} port {port} ssh2"
        self.write(when, host, tag, message)
        shape = self.rng.randrange(100)
        if at_most > 1 and shape < 12:
            self.write(when, host, tag, message)
            return 2, known
        if at_most > 5 and shape < 30:
            more = self.rng.randint(2, 5)
            self.write(when + timedelta(seconds=7), host, tag, f"message repeated {more} times: [ {message}]")
            return 1 + more, known
        if shape > 80:
            self.write(when, host, tag, self.aftermath(user, shown, port))
        return 1, known

    def unknown_user(self) -> str:
        if chance(self.rng, 12):
            return f"x from {self.rng.choice(BAIT)} port 22 ssh2"
        return self.rng.choice(UNKNOWN_USERS)

    def aftermath(self, user: str, shown: str, port: int) -> str:
        pam = f"logname= uid=0 euid=0 tty=ssh ruser= rhost={shown}"
        return self.rng.choice(
            (
                f"Connection closed by {user} {shown} port {port} [preauth]",
                f"pam_unix(sshd:auth): authentication failure; {pam}",
                f"PAM 2 more authentication failures; {pam}",
                f"error: maximum authentication attempts exceeded for {user} from {shown} port {port} ssh2",
            )
        )


def pick_moment(rng: Random, first: datetime, last: datetime) -> datetime:
    """A moment at least a minute inside the span, so that a repeat stays in it too."""
    return first + timedelta(seconds=rng.randint(60, int((last - first).total_seconds()) - 60))


def attack(log: AuthLog, address: str, attempts: int) -> None:
    """Writes exactly so many attempts that count, and some that do not: other days, other hosts."""
    rng, left = log.rng, attempts
    while left:
        when = pick_moment(rng, WINDOW_FIRST, WINDOW_LAST)
        done, known = log.fail(when, "gate1", address, left)
        log.tally(address, done, known)
        left -= done
    for _ in range(attempts // 12):
        log.fail(pick_moment(rng, LOG_FIRST, WINDOW_FIRST), "gate1", address, 6)
        log.fail(pick_moment(rng, WINDOW_LAST, LOG_LAST), "gate1", address, 6)
        log.fail(pick_moment(rng, WINDOW_FIRST, WINDOW_LAST), "gate2", address, 6)


def border_attempts(log: AuthLog) -> None:
    """Attempts in the last and first second of the window, on both sides."""
    outside = (WINDOW_FIRST - timedelta(seconds=1), WINDOW_LAST)
    inside = (WINDOW_FIRST, WINDOW_LAST - timedelta(seconds=1))
    for address, _ in ATTACKERS[:4]:
        message = f"Failed password for root from {address} port 40022 ssh2"
        for when in outside:
            log.write(when, "gate1", log.tag("sshd"), message)
    for when in inside:
        message = "Failed password for root from 198.18.200.1 port 40022 ssh2"
        log.write(when, "gate1", log.tag("sshd"), message)
        log.tally("198.18.200.1", 1, known=True)


def no_attempts(user: str, address: str, port: int) -> tuple[tuple[str, str], ...]:
    """What else such a file holds, as program and message. None of it counts."""
    peer = f"{address} port {port}"
    return (
        ("sshd", f"Accepted password for {user} from {peer} ssh2"),
        ("sshd", f"Accepted publickey for {user} from {peer} ssh2: ED25519 SHA256:q7Hk"),
        ("sshd", f"Failed publickey for {user} from {peer} ssh2: RSA SHA256:Zr0a"),
        ("sshd", f"Failed keyboard-interactive/pam for {user} from {peer} ssh2"),
        ("sshd", f"Failed none for invalid user {user}1 from {peer} ssh2"),
        ("sshd", f"message repeated 3 times: [ Connection reset by {peer} [preauth]]"),
        ("sshd", f"Invalid user Failed password for root from {address} port 22 ssh2 from {peer}"),
        ("sftp-gate", f"Failed password for {user} from {peer} ssh2"),
        ("sudo", f"   {user} : TTY=pts/0 ; PWD=/home/{user} ; USER=root ; COMMAND=/usr/bin/id"),
        ("CRON", "pam_unix(cron:session): session opened for user root(uid=0) by (uid=0)"),
        ("kernel", f"[UFW BLOCK] IN=eth0 OUT= SRC={address} DST=192.0.2.251 PROTO=TCP DPT=22"),
    )


def background(log: AuthLog) -> None:
    rng = log.rng
    for _ in range(1300):
        when, host = pick_moment(rng, LOG_FIRST, LOG_LAST), rng.choice(("gate1", "gate1", "gate2", "web1"))
        address, port = f"192.0.2.{rng.randint(1, 250)}", rng.randint(30000, 65000)
        program, message = rng.choice(no_attempts(rng.choice(KNOWN_USERS), address, port))
        log.write(when, host, program if program == "kernel" else log.tag(program), message)


def make_logins(files: Path, rng: Random) -> Json:
    log = AuthLog(rng)
    for address, attempts in ATTACKERS:
        attack(log, address, attempts)
    for address in SCANNERS:
        attack(log, address, rng.randint(3, 24))
    for address in MONITORS:
        for _ in range(140):
            log.fail(pick_moment(rng, WINDOW_FIRST, WINDOW_LAST), "gate1", address, 6)
    border_attempts(log)
    background(log)
    write_text(files / "data/auth.log", "".join(f"{line}\n" for _, _, line in sorted(log.lines)))
    ranking = sorted(log.per_address.items(), key=lambda entry: (-entry[1], entry[0]))
    return {
        "total": sum(log.per_address.values()),
        "addresses": len(log.per_address),
        "invalid_user": log.on_unknown_users,
        "top": [{"address": address, "attempts": attempts} for address, attempts in ranking[:10]],
    }


# --- inventory-bug -----------------------------------------------------------------------------

VALUATION_DAY = date(2024, 6, 30)
CATEGORIES = ("Audio", "Cables", "Displays", "Furniture", "Keyboards", "Storage")
# Category, percent, first day, last day. Both days belong to the promotion.
PROMOTIONS = (
    ("Audio", 10, date(2024, 6, 1), date(2024, 6, 30)),
    ("Cables", 15, date(2024, 6, 30), date(2024, 7, 14)),
    ("Cables", 5, date(2024, 5, 1), date(2024, 8, 31)),
    ("Displays", 20, date(2024, 5, 1), date(2024, 6, 29)),
    ("Furniture", 15, date(2024, 7, 1), date(2024, 7, 31)),
    ("Keyboards", 10, date(2024, 6, 15), date(2024, 7, 15)),
    ("Keyboards", 25, date(2023, 6, 15), date(2023, 7, 15)),
)
UNITS = ((1, 9), (1, 9), (10, 10), (11, 49), (50, 50), (51, 199), (200, 200), (201, 640))


def price_in_cents(list_cents: int, cost_cents: int, units: int, category: str, clearance: bool) -> int:
    """Cents for one unit, by PRICING.md, in whole ten-thousandths of a cent until the last step."""
    if clearance:
        return (list_cents * 60 * 2 + 100) // 200
    volume = 18 if units >= 200 else 12 if units >= 50 else 5 if units >= 10 else 0
    on_now = [
        percent for name, percent, first, last in PROMOTIONS if name == category and first <= VALUATION_DAY <= last
    ]
    scaled = list_cents * (100 - volume) * (100 - max(on_now, default=0))
    return max((scaled * 2 + 10000) // 20000, cost_cents)


def make_inventory(files: Path, rng: Random) -> Json:
    rows: list[list[str]] = []
    value: Counter[str] = Counter()
    for number in range(640):
        category = rng.choice(CATEGORIES)
        list_cents = rng.randint(40, 2600) * 10 - rng.choice((0, 0, 1, 5))
        cost_cents = list_cents * rng.randint(45, 88) // 100
        sellable = rng.randint(*rng.choice(UNITS))
        damaged = rng.randint(1, 6) if chance(rng, 25) else 0
        clearance = chance(rng, 8)
        value[category] += sellable * price_in_cents(list_cents, cost_cents, sellable, category, clearance)
        money = [f"{cents // 100}.{cents % 100:02d}" for cents in (list_cents, cost_cents)]
        stock = [str(sellable + damaged), str(damaged), "yes" if clearance else "no"]
        rows.append([f"{category[:2].upper()}-{1000 + number}", category, *money, *stock])
    rng.shuffle(rows)
    header = ("sku", "category", "list_price", "cost", "on_hand", "damaged", "clearance")
    write_csv(files / "data/stock.csv", header, rows)
    promotions = [
        {"category": name, "percent": percent, "first_day": first.isoformat(), "last_day": last.isoformat()}
        for name, percent, first, last in PROMOTIONS
    ]
    write_text(files / "data/promotions.json", json.dumps(promotions, indent=2) + "\n")
    return {
        "total_value": sum(value.values()) / 100,
        "by_category": {category: value[category] / 100 for category in CATEGORIES},
    }


# --- orders-json -------------------------------------------------------------------------------

WANTED = "KB-2041"
# Not the wanted product, however much they look like it.
LOOKALIKES = ("KB-2041-R", "KB-20411", "AKB-2041", "KB-204")
# EUR per whole unit, in hundred-thousandths; minor units in one whole unit.
CURRENCIES = {"EUR": (100000, 100), "USD": (92150, 100), "GBP": (116820, 100), "JPY": (612, 1)}


@dataclass
class Tally:
    """Units of the wanted product, and their price in minor units of the order's currency."""

    units: int = 0
    minor: int = 0

    def add(self, other: Tally, times: int) -> None:
        self.units += other.units * times
        self.minor += other.minor * times


@dataclass(frozen=True)
class Customer:
    id: str
    name: str
    internal: bool
    merged_into: str | None


def draw_customers(rng: Random) -> dict[str, Customer]:
    """Merges point at customers with a higher number, so chains end and never loop."""
    customers = {}
    for number in range(1, 321):
        own, target = f"C-{number:04d}", f"C-{number + rng.randint(1, 3):04d}"
        merged = target if number < 310 and chance(rng, 16) else None
        customers[own] = Customer(own, draw_name(rng), chance(rng, 5), merged)
    return customers


def final_customer(customers: dict[str, Customer], customer_id: str) -> Customer:
    customer = customers[customer_id]
    return customer if customer.merged_into is None else final_customer(customers, customer.merged_into)


def draw_sku(rng: Random) -> tuple[str, bool]:
    """A stock-keeping unit as spelled in an order, and if it is the wanted one."""
    shape = rng.randrange(100)
    if shape < 26:
        return rng.choice((WANTED, WANTED, WANTED, WANTED.lower(), f"{WANTED} ", f" {WANTED}")), True
    if shape < 40:
        return rng.choice(LOOKALIKES), False
    return f"{rng.choice(('MS', 'DS', 'HB', 'CM'))}-{rng.randint(1000, 1060)}", False


def spell_quantity(rng: Random, quantity: int) -> int | str:
    return str(quantity) if chance(rng, 15) else quantity


def draw_product(rng: Random, minor_of: Callable[[int], int]) -> tuple[Json, Tally]:
    sku, wanted = draw_sku(rng)
    price = minor_of(rng.randint(2990, 8990))
    return {"sku": sku, "unit_price": price}, Tally(1, price) if wanted else Tally()


def draw_item(rng: Random, minor_of: Callable[[int], int], depth: int = 0) -> tuple[Json, Tally]:
    """A product or a bundle, and what one of it holds of the wanted product."""
    if depth == 2 or not chance(rng, 22):
        return draw_product(rng, minor_of)
    held, components = Tally(), []
    for _ in range(rng.randint(2, 3)):
        component, tally = draw_item(rng, minor_of, depth + 1)
        quantity = rng.randint(1, 3)
        held.add(tally, quantity)
        components.append({**component, "quantity": spell_quantity(rng, quantity)})
    bundle = {"sku": f"BUNDLE-{rng.randint(10, 40)}", "unit_price": minor_of(rng.randint(9900, 29900))}
    return {**bundle, "components": components}, held


def draw_items(rng: Random, minor_of: Callable[[int], int]) -> tuple[list[Json], Tally]:
    """The items of one order and what the customer kept of the wanted product."""
    kept, items = Tally(), []
    for _ in range(rng.randint(1, 4)):
        item, tally = draw_item(rng, minor_of)
        quantity = rng.randint(1, 4)
        returned = rng.choice((quantity, rng.randint(1, quantity))) if chance(rng, 14) else 0
        kept.add(tally, quantity - returned)
        item["quantity"] = spell_quantity(rng, quantity)
        if returned or chance(rng, 40):
            item["returned"] = returned if returned else rng.choice((0, None))
        items.append(item)
    return items, kept


@dataclass
class OrderBook:
    rng: Random
    customers: dict[str, Customer]
    per_quarter: list[list[Json]] = field(default_factory=lambda: [[], [], [], []])
    units: Counter[str] = field(default_factory=Counter)
    spend: dict[str, Fraction] = field(default_factory=lambda: defaultdict(Fraction))

    def add_order(self, number: int) -> None:
        """Writes an order's revisions, the later ones possibly in a later file, and tallies the last."""
        rng, placed = self.rng, pick_day(self.rng, date(2024, 1, 1), date(2024, 12, 31))
        currency = rng.choice(("EUR", "EUR", "EUR", "USD", "GBP", "JPY"))
        rate, minor_units = CURRENCIES[currency]
        rate += 0 if currency == "EUR" else rng.randint(-rate // 50, rate // 50)
        customer, revisions = rng.choice(list(self.customers.values())), rng.choice((1, 1, 1, 1, 1, 2, 3))
        for revision in range(1, revisions + 1):
            items, kept = draw_items(rng, lambda cents: cents * 1000 * minor_units // rate)
            status = rng.choice(("completed", "completed", "completed", "shipped", "cancelled", "pending"))
            delay = rng.choice((0, 0, 1)) if revision > 1 else 0
            order = {
                "order_id": f"SO-{number}",
                "revision": revision,
                "placed_on": placed.isoformat(),
                "status": status,
                "customer": {"id": customer.id, "name": customer.name},
                "payment": {"currency": currency, "eur_rate": f"{rate // 100000}.{rate % 100000:05d}"},
                "items": items,
            }
            self.per_quarter[min(3, (placed.month - 1) // 3 + delay)].append(order)
        if status in ("completed", "shipped") and kept.units:
            eur_per_minor = Fraction(rate, 100000 * minor_units)
            self.tally(final_customer(self.customers, customer.id), kept, eur_per_minor)

    def tally(self, customer: Customer, kept: Tally, eur_per_minor: Fraction) -> None:
        if not customer.internal:
            self.units[customer.id] += kept.units
            self.spend[customer.id] += kept.minor * eur_per_minor


def make_orders(files: Path, rng: Random) -> Json:
    book = OrderBook(rng, draw_customers(rng))
    for number in range(41000, 42500):
        book.add_order(number)
    for index, orders in enumerate(book.per_quarter):
        rng.shuffle(orders)
        lines = ",\n".join(json.dumps(order, ensure_ascii=False) for order in orders)
        write_text(files / f"data/orders-2024-q{index + 1}.json", f'{{"orders": [\n{lines}\n]}}\n')
    people = ",\n".join(json.dumps(vars(customer)) for customer in book.customers.values())
    write_text(files / "data/customers.json", f'{{"customers": [\n{people}\n]}}\n')
    ranking = sorted(book.spend.items(), key=lambda entry: (-entry[1], entry[0]))
    return {
        "customers": len(book.units),
        "units": sum(book.units.values()),
        "spend_eur": float(sum(book.spend.values())),
        "top_customers": [{"id": name, "spend_eur": float(spend)} for name, spend in ranking[:5]],
    }


# --- salaries-sqlite ---------------------------------------------------------------------------

YEARS = tuple(range(2019, 2024))
# Two rows of one name: a department that was closed and founded again.
DEPARTMENTS = {1: "Engineering", 2: "Sales", 3: "Support", 4: "Finance", 5: "Logistics", 9: "Support"}
YEARLY_BASE = {"Engineering": 65000, "Sales": 54000, "Support": 38000, "Finance": 57000, "Logistics": 36000}
RAISE_PERMILLE = {"Engineering": 18, "Sales": 27, "Support": 55, "Finance": 42, "Logistics": 38}
SCHEMA = """
CREATE TABLE departments (id INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE employees (id INTEGER PRIMARY KEY, name TEXT NOT NULL, kind TEXT);
CREATE TABLE assignments (employee_id INTEGER NOT NULL, department_id INTEGER NOT NULL,
    is_primary INTEGER NOT NULL, valid_from TEXT NOT NULL, valid_to TEXT);
CREATE TABLE salaries (id INTEGER PRIMARY KEY, employee_id INTEGER NOT NULL, amount, period TEXT NOT NULL,
    fte_percent INTEGER NOT NULL, valid_from TEXT NOT NULL, valid_to TEXT);
CREATE INDEX assignments_by_employee ON assignments (employee_id);
"""


@dataclass(frozen=True)
class Pay:
    """From `start` on, one employee earns `cents` per period for `fte_percent` of a full week."""

    start: date
    cents: int | None
    period: str
    fte_percent: int

    def full_time_yearly(self) -> Fraction | None:
        if self.cents is None:
            return None
        return Fraction(self.cents * (12 if self.period == "month" else 1), self.fte_percent)


@dataclass
class Personnel:
    """The rows of the database, and the full-time yearly salaries (EUR) by year and department."""

    rng: Random
    employees: list[tuple[object, ...]] = field(default_factory=list)
    assignments: list[tuple[object, ...]] = field(default_factory=list)
    salaries: list[tuple[object, ...]] = field(default_factory=list)
    paid: dict[int, dict[str, list[Fraction]]] = field(
        default_factory=lambda: {year: defaultdict(list) for year in YEARS}
    )

    def hire(self, number: int) -> None:
        rng = self.rng
        kind = rng.choice(("employee", "employee", "employee", "employee", None, "contractor"))
        self.employees.append((number, draw_name(rng), kind))
        start = draw_start(rng)
        end = draw_end(rng, start)
        posts = self.assign(number, start, end)
        pays = self.pay(number, start, end, DEPARTMENTS[posts[0][1]])
        if kind == "contractor":
            return
        for year in YEARS:
            day = date(year, 12, 31)
            if start <= day and (end is None or day <= end):
                department = [department for first, department in posts if first <= day][-1]
                salary = [pay for pay in pays if pay.start <= day][-1].full_time_yearly()
                if salary is not None:
                    self.paid[year][DEPARTMENTS[department]].append(salary)

    def assign(self, number: int, start: date, end: date | None) -> list[tuple[date, int]]:
        """Writes the posts an employee held: the main ones in turn, and sometimes a second one beside."""
        rng, last = self.rng, end or date(2024, 6, 30)
        posts = [(start, rng.choice(list(DEPARTMENTS)))]
        if chance(rng, 35) and (last - start).days > 60:
            moved = pick_day(rng, start + timedelta(days=30), last)
            year_end = date(moved.year, 12, 31)
            moved = year_end if chance(rng, 30) and year_end <= last else moved
            posts.append((moved, rng.choice(list(DEPARTMENTS))))
        ends = ends_of([first for first, _ in posts], end)
        for (first, department), until in zip(posts, ends, strict=True):
            self.assignments.append((number, department, 1, first.isoformat(), until))
        if chance(rng, 15):
            until = end.isoformat() if end else None
            self.assignments.append((number, rng.choice(list(DEPARTMENTS)), 0, start.isoformat(), until))
        return posts

    def pay(self, number: int, start: date, end: date | None, department: str) -> list[Pay]:
        """Writes what an employee earned, a row for each raise, and sometimes a wrong one first."""
        rng, pays = self.rng, []
        permille = RAISE_PERMILLE[department]
        grown_since_2014 = 1000 + permille * (start.year - 2014)
        yearly = YEARLY_BASE[department] * rng.randint(80, 120) * grown_since_2014 // 1000
        period, fte = rng.choice(("year", "year", "month")), rng.choice((100, 100, 100, 80, 60, 50))
        when, last = start, end or date(2024, 6, 30)
        while when <= last:
            cents = yearly * fte // (1200 if period == "month" else 100)
            pays.append(Pay(when, None if chance(rng, 3) else cents, period, fte))
            yearly += yearly * permille * rng.randint(7, 15) // 10000
            when = next_raise(rng, when)
        for pay, until in zip(pays, ends_of([pay.start for pay in pays], end), strict=True):
            if chance(rng, 40 if pay.cents is None else 6):
                self.write_pay(number, pay, (pay.cents or 400000) * rng.choice((10, 13)) // 11, until)
            self.write_pay(number, pay, pay.cents, until)
        return pays

    def write_pay(self, number: int, pay: Pay, cents: int | None, until: str | None) -> None:
        amount: float | str | None = None
        if cents is not None:
            amount = f"{cents // 100:,}.{cents % 100:02d}" if chance(self.rng, 12) else cents / 100
        when = (pay.start.isoformat(), until)
        row = (len(self.salaries) + 1, number, amount, pay.period, pay.fte_percent, *when)
        self.salaries.append(row)


def draw_start(rng: Random) -> date:
    if chance(rng, 25):
        return date(rng.randint(2015, 2023), 12, 31)
    return pick_day(rng, date(2014, 1, 1), date(2023, 9, 30))


def draw_end(rng: Random, start: date) -> date | None:
    """The last day of an employment, the year's last day more often than others."""
    if not chance(rng, 45):
        return None
    day = pick_day(rng, start, date(2024, 3, 31))
    return date(day.year, 12, 31) if chance(rng, 40) else day


def next_raise(rng: Random, day: date) -> date:
    year = day.year + rng.choice((1, 1, 1, 2))
    return rng.choice((date(year, 1, 1), date(year, 7, 1), date(year, 12, 31)))


def ends_of(starts: Sequence[date], end: date | None) -> list[str | None]:
    """The last day of each span: the day before the next one starts, or the end of all."""
    days = [start - timedelta(days=1) for start in starts[1:]]
    return [*(day.isoformat() for day in days), end.isoformat() if end else None]


def write_database(path: Path, staff: Personnel) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    database = sqlite3.connect(path)
    with database:
        database.executescript(SCHEMA)
        database.executemany("INSERT INTO departments VALUES (?, ?)", DEPARTMENTS.items())
        database.executemany("INSERT INTO employees VALUES (?, ?, ?)", staff.employees)
        database.executemany("INSERT INTO assignments VALUES (?, ?, ?, ?, ?)", staff.assignments)
        database.executemany("INSERT INTO salaries VALUES (?, ?, ?, ?, ?, ?, ?)", staff.salaries)
    database.close()


def make_salaries(files: Path, rng: Random) -> Json:
    staff = Personnel(rng)
    for number in range(1, 701):
        staff.hire(number)
    write_database(files / "data/hr.db", staff)
    names = sorted(set(DEPARTMENTS.values()))
    average = {name: {year: mean(staff.paid[year][name]) for year in YEARS} for name in names}
    growth = {name: average[name][2023] / average[name][2019] - 1 for name in names}
    fastest = max(names, key=lambda name: growth[name])
    return {
        "averages": {name: {str(year): cents_of(average[name][year]) for year in YEARS} for name in names},
        "company": {str(year): cents_of(mean([*chain(*staff.paid[year].values())])) for year in YEARS},
        "highest": {str(year): max(names, key=lambda name: average[name][year]) for year in YEARS},
        "fastest_growth": {"department": fastest, "percent": cents_of(growth[fastest] * 100)},
    }


def mean(values: Sequence[Fraction]) -> Fraction:
    return sum(values, Fraction()) / len(values)


def cents_of(value: Fraction) -> float:
    """The value to two decimals, halves up."""
    return int(value * 100 + Fraction(1, 2)) / 100


# --- all of them -------------------------------------------------------------------------------

MAKERS: dict[str, Callable[[Path, Random], Json]] = {
    "sales-by-region": make_sales,
    "failed-logins": make_logins,
    "inventory-bug": make_inventory,
    "orders-json": make_orders,
    "salaries-sqlite": make_salaries,
}


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for task, make in MAKERS.items():
        expected = make(target / task / "files", Random(task))
        write_text(target / task / "expected.json", json.dumps(expected, indent=2) + "\n")


if __name__ == "__main__":
    main()
