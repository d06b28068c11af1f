"""The charts of a page: Vega-Lite specifications, rendered to SVG here, so that a page needs no code to draw them.

Colours are the page's custom properties, so that they follow its scheme. Text comes from names of harnesses and models
alone, escaped by the renderer; nothing that an agent wrote enters a chart.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle, islice
from typing import Any

import vl_convert

from report.record import Json, plain

VEGA_LITE = "6.4"
SERIES = 8  # colours --series-1 and so on in page.css; more pairs than that share them, and differ by shape alone
WIDTH = 380  # of a whole chart, so that all are scaled alike
TEXT, FAINT = "var(--text)", "var(--line)"
CONFIG: Json = {
    "background": "transparent",
    "padding": {"left": 4, "top": 4, "right": 12, "bottom": 4},
    "font": "system-ui, sans-serif",
    "view": {"stroke": FAINT},
    "axis": {
        "labelColor": TEXT,
        "titleColor": TEXT,
        "gridColor": FAINT,
        "domainColor": FAINT,
        "tickColor": FAINT,
        "labelFontSize": 13,
        "titleFontSize": 13,
        "titleFontWeight": "normal",
        "labelLimit": 140,
    },
    "legend": {
        "labelColor": TEXT,
        "titleColor": TEXT,
        "labelFontSize": 13,
        "labelLimit": 150,
        "orient": "bottom",
        "columns": 2,
        "columnPadding": 24,
        "layout": {"direction": "vertical", "anchor": "start"},
        "symbolStrokeWidth": 2,
    },
}


def name(harness: str, model: str) -> str:
    """A pair as tables, charts and filters of a page show it."""
    return f"{plain(harness)} · {plain(model)}"


def by_pair(names: Iterable[str], values: Iterable[str], **more: Any) -> Json:
    """An encoding that tells pairs apart by `values`, which repeat when there are more pairs."""
    domain = sorted(set(names))
    scale = {"domain": domain, "range": [*islice(cycle(values), len(domain))]}
    return {"field": "pair", "type": "nominal", "scale": scale, "title": None, **more}


COLOURS = tuple(f"var(--series-{n})" for n in range(1, SERIES + 1))
SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down")  # not as many as colours, so that both differ


def render(values: list[Json], body: Json) -> str:
    """An SVG element."""
    spec = {
        "data": {"values": values},
        "config": CONFIG,
        "width": WIDTH,
        "autosize": {"type": "fit-x", "contains": "padding"},
        **body,
    }
    return vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE)


def intervals(rows: list[Json]) -> str:
    """Each pair's mean reward with its interval; "" if nothing was scored."""
    values = []
    for row in rows:
        low, high = row["reward, 95 %"] or (None, None)
        who = name(row["harness"], row["model"])
        if row["mean reward"] is not None:
            values.append({"pair": who, "mean": row["mean reward"], "low": low, "high": high})
    if not values:
        return ""
    y = {"field": "pair", "type": "nominal", "title": None}
    x = {
        "type": "quantitative",
        "scale": {"domain": [0, 1]},
        "axis": {"tickCount": 5},
        "title": "mean reward, 95 % interval",
    }
    shade = by_pair((value["pair"] for value in values), COLOURS, legend=None)
    rule = {"y": y, "x": {**x, "field": "low"}, "x2": {"field": "high"}, "color": shade}
    point = {"y": y, "x": {**x, "field": "mean"}, "color": shade}
    layers = [
        {"mark": {"type": "rule", "strokeWidth": 2}, "encoding": rule},
        {"mark": {"type": "point", "filled": True, "size": 70, "opacity": 1}, "encoding": point},
    ]
    return render(values, {"layer": layers, "height": {"step": 30}})


def curves(rows: list[Json]) -> str:
    """pass@k and pass^k over k; "" if there is one k only."""
    values = []
    for row in rows:
        pair = name(row["harness"], row["model"])
        for column, value in row.items():
            kind, k = column[:5], column[5:]
            if kind in ("pass@", "pass^") and k.isdecimal() and value[0] is not None:
                values.append({"pair": pair, "k": int(k), "estimate": f"{kind}k", "value": value[0]})
    if len({value["k"] for value in values}) < 2:
        return ""
    pairs = [value["pair"] for value in values]
    encoding = {
        "x": {
            "field": "k",
            "type": "quantitative",
            "scale": {"domain": [1, max(value["k"] for value in values)], "nice": False},
            "axis": {"tickMinStep": 1, "format": "d"},
        },
        "y": {"field": "value", "type": "quantitative", "scale": {"domain": [0, 1]}, "title": None},
        "color": by_pair(pairs, COLOURS),
        "shape": by_pair(pairs, SHAPES),
        "strokeDash": {
            "field": "estimate",
            "type": "nominal",
            "title": None,
            "scale": {"domain": ["pass@k", "pass^k"], "range": [[1, 0], [4, 4]]},
            "legend": {"symbolType": "stroke", "symbolSize": 400},
        },
    }
    return render(values, {"mark": {"type": "line", "point": {"size": 50}}, "encoding": encoding, "height": 150})


def boxes(title: str, values: list[tuple[str, float]]) -> str:
    """Least, quartiles and most of (pair, value); "" if there is none."""
    if not values:
        return ""
    data = [{"pair": pair, "value": value} for pair, value in values]
    encoding = {
        "y": {"field": "pair", "type": "nominal", "title": None},
        "x": {"field": "value", "type": "quantitative", "title": title, "axis": {"tickCount": 5, "format": "~s"}},
        "color": by_pair((pair for pair, _ in values), COLOURS, legend=None),
    }
    line = {"color": TEXT}
    mark = {"type": "boxplot", "extent": "min-max", "size": 14, "median": line, "rule": line, "ticks": line}
    return render(data, {"mark": mark, "encoding": encoding, "height": {"step": 30}})
