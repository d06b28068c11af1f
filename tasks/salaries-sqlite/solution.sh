#!/usr/bin/env bash
# One query gives everybody's department and full-time yearly salary on a day; the rest is averaging.
set -euo pipefail
mkdir -p outputs
python3 - <<'PYTHON'
import json
import sqlite3
from statistics import fmean

YEARS = range(2019, 2024)
ON_DAY = """
WITH current AS (
    SELECT max(id) AS id FROM salaries
    WHERE valid_from <= :day AND (valid_to IS NULL OR valid_to >= :day)
    GROUP BY employee_id
)
SELECT
    departments.name,
    CAST(replace(salaries.amount, ',', '') AS REAL)
        * CASE salaries.period WHEN 'month' THEN 12 WHEN 'year' THEN 1 END
        * 100.0 / salaries.fte_percent
FROM current
JOIN salaries ON salaries.id = current.id
JOIN employees ON employees.id = salaries.employee_id
JOIN assignments ON assignments.employee_id = employees.id
JOIN departments ON departments.id = assignments.department_id
WHERE employees.kind IS NOT 'contractor'
    AND assignments.is_primary = 1
    AND assignments.valid_from <= :day
    AND (assignments.valid_to IS NULL OR assignments.valid_to >= :day)
    AND salaries.amount IS NOT NULL
"""

database = sqlite3.connect("data/hr.db")
names = [name for (name,) in database.execute("SELECT DISTINCT name FROM departments ORDER BY name")]
averages = {name: {} for name in names}
company = {}
for year in YEARS:
    salaries = database.execute(ON_DAY, {"day": f"{year}-12-31"}).fetchall()
    company[year] = fmean(salary for _, salary in salaries)
    for name in names:
        averages[name][year] = fmean(salary for department, salary in salaries if department == name)

growth = {name: averages[name][2023] / averages[name][2019] - 1 for name in names}
fastest = max(names, key=growth.get)
answer = {
    "averages": {name: {year: round(value, 2) for year, value in averages[name].items()} for name in names},
    "company": {year: round(value, 2) for year, value in company.items()},
    "highest": {year: max(names, key=lambda name: averages[name][year]) for year in YEARS},
    "fastest_growth": {"department": fastest, "percent": round(100 * growth[fastest], 2)},
}
with open("outputs/answer.json", "w") as file:
    json.dump(answer, file, indent=2)
PYTHON
