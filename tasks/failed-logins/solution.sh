#!/usr/bin/env bash
# One pass over the log: which lines are attempts, how many each stands for, and where it came from.
set -euo pipefail
mkdir -p outputs
python3 - <<'PYTHON'
import ipaddress
import json
import re
from collections import Counter
from datetime import datetime, timedelta

LINE = re.compile(r"(\w{3} +\d+ [\d:]{8}) gate1 sshd(?:\[\d+\])?: (.*)")
REPEATED = re.compile(r"message repeated (\d+) times: \[ (.*)\]")
# The user name is matched greedily, so that the address is the last one in the message.
ATTEMPT = re.compile(r"Failed password for (.*) from (\S+) port \d+ ssh2")
OFFSET = timedelta(hours=2)
FIRST, END = datetime(2024, 5, 6), datetime(2024, 5, 13)
MONITORING = ipaddress.ip_network("10.20.0.0/16")

per_address = Counter()
invalid_user = 0
with open("data/auth.log", encoding="utf-8") as log:
    for text in log:
        line = LINE.fullmatch(text.rstrip("\n"))
        if not line:
            continue
        stamp, message = line.groups()
        times = 1
        if repeated := REPEATED.fullmatch(message):
            times, message = int(repeated[1]), repeated[2]
        attempt = ATTEMPT.fullmatch(message)
        when = datetime.strptime(f"2024 {stamp}", "%Y %b %d %H:%M:%S") - OFFSET
        if not attempt or not FIRST <= when < END:
            continue
        address = attempt[2].removeprefix("::ffff:")
        if ipaddress.ip_address(address) in MONITORING:
            continue
        per_address[address] += times
        if message.startswith("Failed password for invalid user "):
            invalid_user += times

ranking = sorted(per_address.items(), key=lambda entry: (-entry[1], entry[0]))
answer = {
    "total": sum(per_address.values()),
    "addresses": len(per_address),
    "invalid_user": invalid_user,
    "top": [{"address": address, "attempts": attempts} for address, attempts in ranking[:10]],
}
with open("outputs/answer.json", "w") as file:
    json.dump(answer, file, indent=2)
PYTHON
