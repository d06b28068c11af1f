"""The page of a run in headless Chromium: nothing of what an agent wrote runs or is loaded, and all of it can be read.

    pytest -m browser        with Debian's chromium and chromium-driver, and selenium (.ci/requirements.txt)

Every attack is shown to work on a page that puts the same text into its markup. What matters is counted in nodes and
requests, not in seconds.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_files import result, rewards, write_run, write_task

from report.page import write_page
from report.reading import Run
from report.record import Json, Result

pytestmark = pytest.mark.browser

PHONE, DESK = (375, 800), (1280, 900)


class Browser:
    """One headless Chromium; each page is opened anew, with what it requests and complains of counted from there."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, size: tuple[int, int] = DESK, scheme: str = "light", place: str = "") -> None:
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
        self.driver.get("about:blank")
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        self.requests(), self.complaints()
        self.driver.get(f"{path.as_uri()}{place}")

    def open_page(self, path: Path, **how: Any) -> None:
        self.open(path, **how)
        self.until("document.body.hasAttribute('data-ready')")

    def open_rollout(self, line: int) -> None:
        self.run(f"location.hash = '#{line}'")
        self.until(f"document.getElementById('rollout').dataset.line === '{line}'")

    def run(self, script: str, *given: Any) -> Any:
        return self.driver.execute_script(script, *given)

    def until(self, condition: str) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 30, 0.02).until(lambda _: self.run(f"return {condition}"))

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map(node => node.textContent)"
        found: list[str] = self.run(script, selector)
        return found

    def count(self, selector: str = "*") -> int:
        found: int = self.run("return document.querySelectorAll(arguments[0]).length", selector)
        return found

    def requests(self) -> list[str]:
        """URLs asked for since the last call, but for the pages that the tests open."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return [each["request"]["url"] for each in sent if each.get("type") != "Document"]

    def complaints(self) -> list[str]:
        """What the console said since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def choose(self, name: str, value: str) -> None:
        """Set a filter as a person does."""
        script = """const control = document.getElementById('filters').elements[arguments[0]];
            if (control.type === 'checkbox') control.checked = Boolean(arguments[1]); else control.value = arguments[1];
            control.dispatchEvent(new Event('input', {bubbles: true}))"""
        self.run(script, name, value)

    def listed(self) -> list[str]:
        return self.texts("#list tbody tr")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no chromium and chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    running = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield Browser(running)
    finally:
        running.quit()


def page(folder: Path, results: list[Result]) -> Path:
    write_page(Run(write_run(folder / "x.jsonl", results)), folder / "x.html", folder / "tasks")
    return folder / "x.html"


# --- Attacks ----------------------------------------------------------------------------------

BIDI, ANSI = "safe\u202egnp.exe", "\x1b[31mred\x1b[0m"
ATTACKS = [
    "<img src=x.invalid onerror=\"window.hit='img'\">",
    "<script>window.hit = 'script'</script>",
    "</script><script>window.hit = 'closed'</script>",
    "</textarea></pre></td><svg onload=\"window.hit='svg'\"></svg>",
    "<iframe srcdoc=\"<script>parent.hit='frame'</script>\"></iframe>",
    '<link rel="stylesheet" href="x.invalid.css"><style>body{display:none}</style>',
    '<a href="javascript:window.hit=1">here</a>',
    "javascript:window.hit='link'",
    "<!-- <script>",
]
LINKS = "<meta http-equiv='refresh' content='0;url=x.invalid'><base href='https://x.invalid/'>"
ODD: list[Any] = [
    None,
    7,
    "only a text",
    [],
    {},
    {"type": None},
    {"type": 5},
    {"type": "constructor"},
    {"type": "__proto__", "__proto__": {"hit": 1}, "constructor": {"prototype": {"hit": 2}}},
    {"type": "message"},
    {"type": "message", "content": [None, 1, [], {"text": {"a": 1}}, {"type": "input_image", "image_url": ATTACKS[0]}]},
    {"type": "reasoning", "summary": None},
    {"type": "command_execution"},
    {"type": "command_execution", "command": ["a"], "output": {"b": 1}, "exit_code": {"c": 1}, "duration_ms": "x"},
    {"type": "function_call", "name": {"d": 1}, "arguments": {"__proto__": 1}},
    {"type": "from_the_future", "deep": None},
]


def hostile_items() -> list[Any]:
    texts = [*ATTACKS, LINKS, BIDI, ANSI, "\ud800", "nul\x00nul", "zero\u200bwidth"]
    items: list[Any] = []
    for text in texts:
        items += [
            {"type": "message", "role": "assistant", "phase": text, "content": [{"type": "output_text", "text": text}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]},
            {"type": "command_execution", "command": text, "output": text, "exit_code": 1, "cwd": text},
            {"type": "function_call", "name": text, "arguments": text, "status": text},
            {"type": "function_call_output", "output": text, "error": None},
            {"type": "mcp_call", "server_label": text, "name": text, "arguments": {text: text}, "output": text},
            {"type": text, text: text},
        ]
    deep: Any = "bottom"
    for _ in range(90):
        deep = {"d": [deep]} if isinstance(deep, str) else [deep]
    return [*items, *ODD, {"type": "deep", "value": deep}]


@pytest.mark.parametrize("attack", ATTACKS[:6])
def test_control_the_attack_works_in_markup(browser: Browser, tmp_path: Path, attack: str) -> None:
    (plain := tmp_path / "naive.html").write_text(f"<!doctype html><body><script>let x</script>{attack}</body>")
    browser.open(plain)
    if "x.invalid.css" in attack:
        assert browser.run("return getComputedStyle(document.body).display") == "none"
        assert [url for url in browser.requests() if "x.invalid" in url]
    else:
        browser.until("Boolean(window.hit)")


def test_control_a_link_to_script_runs_in_markup(browser: Browser, tmp_path: Path) -> None:
    (plain := tmp_path / "naive.html").write_text(f"<!doctype html><body>{ATTACKS[6]}</body>")
    browser.open(plain)
    browser.run("document.querySelector('a').click()")
    browser.until("window.hit === 1")


def test_nothing_that_an_agent_wrote_runs_or_loads(browser: Browser, tmp_path: Path) -> None:
    items, texts = hostile_items(), [*ATTACKS, LINKS]
    results = [
        result("a", n, 0.0, items=items, error=text, answer={text: text}, session_id=text, usage={text: text})
        for n, text in enumerate(texts)
    ]
    browser.open_page(page(tmp_path, results))
    markup = "img, iframe, link, base, a[href^=javascript], meta[http-equiv=refresh], #rollout script, #rollout style"
    assert [row for text in texts for row in browser.listed() if text in row] and browser.count(markup) == 0
    for line, text in enumerate(texts):
        browser.open_rollout(line)
        while browser.run("const b = document.querySelector('#rollout .more:not([hidden])'); b?.click(); return !!b"):
            pass
        browser.run("for (const d of document.querySelectorAll('#rollout details')) d.open = true")
        browser.until("[...document.querySelectorAll('#rollout details')].every(d => d.querySelector('pre'))")
        browser.run("for (const a of document.querySelectorAll('#rollout li')) a.click()")
        assert browser.count(markup) == 0
        assert browser.texts("#rollout pre.failed") == [text]
        assert len(browser.texts("#rollout li")) == len(items)
    assert browser.run("return [window.hit, {}.hit, document.body.style.cssText]") == [None, None, ""]
    assert browser.requests() == [] and browser.complaints() == []
    shown = browser.texts("#rollout pre")
    for text in texts:
        assert shown.count(text) >= 6, text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (BIDI, "safe\\u202egnp.exe"),
        (ANSI, "\\u001b[31mred\\u001b[0m"),
        ("\ud800 \U0001f600", "\\ud800 \U0001f600"),
        ("nul\x00", "nul\\u0000"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("tag\U000e0041", "tag\\u{e0041}"),
        ("line\nline\ttab\r", "line\nline\ttab\\u000d"),
        ("العربية 日本", "العربية 日本"),
    ],
)
def test_characters_that_cannot_be_seen_are_spelt_out(browser: Browser, tmp_path: Path, text: str, shown: str) -> None:
    items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}]
    browser.open_page(page(tmp_path, [result("a", 0, 0.0, items=items, error=text)]))
    assert shown.replace("\n", "\n") in browser.listed()[0]
    browser.open_rollout(0)
    assert browser.texts("#rollout li pre") == [shown] and browser.texts("#rollout pre.failed") == [shown]


def test_the_policy_holds_even_if_markup_got_in(browser: Browser, tmp_path: Path) -> None:
    """The second wall. With the control: the same injection into a page without the policy."""
    (plain := tmp_path / "naive.html").write_text("<!doctype html><body></body>")
    inject = """const box = document.createElement('div'); document.body.append(box); box.innerHTML = arguments[0];
        const script = document.createElement('script'); script.textContent = "window.ran = 1"; box.append(script)"""
    browser.open(plain)
    browser.run(inject, ATTACKS[0])
    browser.until("window.hit === 'img' && window.ran === 1")
    assert browser.requests()
    browser.open_page(page(tmp_path, [result("a", 0, 1.0)]))
    browser.run(inject, ATTACKS[0])
    browser.until("document.querySelector('img').complete")
    assert browser.run("return [window.hit, window.ran]") == [None, None]
    assert len(browser.complaints()) >= 2


# --- Reading ----------------------------------------------------------------------------------

COMMAND = {"type": "command_execution", "command": "wc -l x", "output": "3 x\n", "exit_code": 2, "duration_ms": 12}
ITEMS: list[Json] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Count."}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I count."}]},
    {**COMMAND, "cwd": "/workspace"},
    {
        "type": "message",
        "role": "assistant",
        "phase": "final_answer",
        "content": [{"type": "output_text", "text": "3"}],
    },
]


def test_a_rollout_reads_in_order_with_its_answer_beside(browser: Browser, tmp_path: Path) -> None:
    digest = write_task(tmp_path / "tasks", "a", {"x": 1, "y": [2]})
    known = {"items": ITEMS, "answer": {"x": 1, "z": 3}, "task_digest": digest, "error": "no value for 'y'"}
    browser.open_page(page(tmp_path, [result("a", 0, 0.0, **known)]), place="#0")
    assert browser.texts("#rollout li h4") == [
        "user · message",
        "reasoning",
        "command · exit code 2 · 12 ms · /workspace",
        "assistant · message · final_answer",
    ]
    assert browser.texts("#rollout li pre") == ["Count.", "I count.", "wc -l x", "3 x\n", "3"]
    assert browser.texts("#rollout .keys tbody tr") == ["x11right", "y[2]missing", "z3not asked for"]
    assert browser.texts("#rollout pre.failed") == ["no value for 'y'"]
    assert browser.run("return document.activeElement.id") == "h-rollout"
    browser.run("history.replaceState(null, '', '#'); window.dispatchEvent(new HashChangeEvent('hashchange'))")
    browser.until("!document.getElementById('overview').hidden")
    assert browser.texts("#rollout") == [""]


def test_links_and_keys_lead_through_rollouts(browser: Browser, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open_page(rewards_page(tmp_path, {"a": [1.0, 0.0], "b": [0.0, None]}))
    browser.choose("task", "1")
    browser.run("document.querySelector('#list a').focus()")
    browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
    browser.until("document.getElementById('rollout').dataset.line === '2'")
    assert browser.texts("#rollout nav a") == ["← All rollouts", "Next"]
    browser.run("document.querySelector('#rollout nav a:last-child').click()")
    browser.until("document.getElementById('rollout').dataset.line === '3'")
    assert browser.texts("#rollout nav a") == ["← All rollouts", "Previous"]
    browser.driver.back()
    browser.driver.back()
    browser.until("!document.getElementById('overview').hidden")
    assert len(browser.listed()) == 2


def test_two_that_are_opened_at_once_end_with_the_last(browser: Browser, tmp_path: Path) -> None:
    browser.open_page(rewards_page(tmp_path, {"a": [1.0, 0.0]}))
    browser.run("for (const place of ['#0', '#1', '#0']) { history.replaceState(null, '', place); route(); }")
    browser.until("document.getElementById('rollout').dataset.line === '0'")
    assert browser.texts("#rollout h3") == ["Answer", "Timeline, 0 items", "Record"]


def test_damaged_data_is_said(browser: Browser, tmp_path: Path) -> None:
    path = rewards_page(tmp_path, {"a": [1.0]})
    before, mark, after = path.read_text().partition('id="details">\n')
    path.write_text(before + mark + "A" + after)
    browser.open_page(path, place="")
    browser.run("location.hash = '#0'")
    browser.until("document.getElementById('trouble').textContent.startsWith('The rollouts cannot be shown')")


def rewards_page(folder: Path, by_task: dict[str, list[float | None]]) -> Path:
    write_page(Run(rewards(folder / "r.jsonl", by_task)), folder / "r.html", folder / "tasks")
    return folder / "r.html"


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ({}, 8),
        ({"task": "1"}, 2),
        ({"pair": "1"}, 2),
        ({"status": "error"}, 1),
        ({"status": "timeout"}, 1),
        ({"reward": "1"}, 3),
        ({"reward": "0"}, 3),
        ({"reward": "part"}, 1),
        ({"reward": "null"}, 1),
        ({"text": "SANDBOX"}, 1),
        ({"text": "beta"}, 2),
        ({"text": "[nothing"}, 0),
        ({"every": "yes"}, 9),
        ({"every": "yes", "status": "error"}, 2),
        ({"task": "0", "reward": "1"}, 1),
    ],
    ids=str,
)
def test_filters(browser: Browser, mixed: Path, filters: dict[str, str], left: int) -> None:
    browser.open_page(mixed)
    for name, value in filters.items():
        browser.choose(name, value)
    assert len(browser.listed()) == left
    (said,) = browser.texts("#count")
    assert said.startswith(f"1 to {left} of {left} " if left else "None ") and said.endswith("of 9 attempts recorded")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = [
        result("alpha", 0, 1.0),
        result("alpha", 1, 0.0, status="timeout"),
        result("alpha", 2, 0.5),
        result("alpha", 3, None, error="no sandbox"),
        result("beta", 0, None, attempt=1, error="lost"),
        result("beta", 0, 1.0, attempt=2),
        result("beta", 1, 0.0),
        result("gamma", 0, 1.0, "pi"),
        result("gamma", 1, 0.0, "pi"),
    ]
    return page(tmp_path_factory.mktemp("mixed"), results)


def test_a_cell_of_the_heat_map_shows_its_rollouts(browser: Browser, mixed: Path) -> None:
    browser.open_page(mixed)
    assert browser.texts(".heat tbody tr") == ["alpha0.50 (3/4)–", "beta0.50–", "gamma–0.50"]
    browser.choose("status", "timeout")
    browser.run('document.querySelector(\'.heat [data-task="2"][data-pair="1"]\').click()')
    assert len(browser.listed()) == 2 and all(row.startswith("gamma") for row in browser.listed())


# --- Size -------------------------------------------------------------------------------------


def many(folder: Path, count: int) -> Path:
    """Rollouts of 20 tasks by two harnesses, with 20 items each."""
    items = [*ITEMS, *[COMMAND] * 16]
    options = {"samples": count // 40, "tasks": 20}
    results = [
        result(f"t{n % 20:02}", n // 40, float(n % 3 == 0), ("codex", "pi")[n // 20 % 2], items=items, options=options,
               duration_s=float(n % 97), error="e" * 400)
        for n in range(count)
    ]  # fmt: skip
    return page(folder, results)


def test_the_size_of_a_run_does_not_grow_the_page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> None:
    """2,000 rollouts make no more nodes than 200, opened, filtered, paged or read."""
    counts = []
    for size in (200, 2000):
        browser.open_page(many(tmp_path_factory.mktemp("many"), size))
        seen = [browser.count(), browser.count("#list tbody tr")]
        browser.choose("text", "t0")
        seen.append(browser.count("#list tbody tr"))
        browser.run("document.getElementById('after').click()")
        browser.open_rollout(size - 1)
        counts.append([*seen, browser.count("#rollout *")])
    small, large = counts
    assert small[1:] == large[1:] and small[1] == 100
    assert large[0] < 1.5 * small[0]  # curves have a point for each k


def test_pages_of_the_list_hold_every_rollout_once(browser: Browser, tmp_path: Path) -> None:
    browser.open_page(many(tmp_path, 240))
    lines = []
    for _ in range(3):
        lines += browser.run("return [...document.querySelectorAll('#list a')].map(a => a.hash)")
        browser.run("document.getElementById('after').click()")
    assert len(lines) == len(set(lines)) == 240
    assert browser.run("return document.getElementById('after').disabled")


def test_a_long_text_and_a_long_timeline_come_in_pieces(browser: Browser, tmp_path: Path) -> None:
    text = "<b>" + "0123456789" * 100_000
    known = {"items": [COMMAND] * 5000, "error": text, "answer": {"x": text}}
    browser.open_page(page(tmp_path, [result("a", 0, 1.0, **known)]), place="#0")
    assert browser.count("#rollout li") == 200 and len(browser.listed()[0]) < 500
    assert [len(shown) for shown in browser.texts("#rollout pre.failed, #rollout .keys pre")] == [20_000] * 2
    browser.run("for (const more of document.querySelectorAll('#rollout pre + .more')) more.click()")
    assert browser.texts("#rollout pre.failed, #rollout .keys pre") == [text, json.dumps(text)]
    browser.run("document.querySelector('#rollout .more').click()")
    assert browser.count("#rollout li") == 400


# --- Light, dark, narrow ----------------------------------------------------------------------

# Text that is seen with less contrast than WCAG 2.2 asks of it (1.4.3: 4.5 to 1), by its own words. A canvas turns any
# notation of a colour into numbers. SVG text is painted by `fill`. Disabled controls are exempt.
FAINT = """
const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
const rgba = (colour) => {
  canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
  return canvas.getImageData(0, 0, 1, 1).data;
};
const light = (colour) => {
  const [r, g, b] = [...rgba(colour)].map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b;
};
const behind = (node) => {
  for (; node; node = node.parentElement) {
    const colour = getComputedStyle(node).backgroundColor;
    if (rgba(colour)[3] === 255) return colour;
  }
  return 'Canvas';
};
const found = []; let seen = 0;
for (const node of document.querySelectorAll('body *')) {
  const own = [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim());
  if (!own || !node.checkVisibility() || node.closest('script, style, :disabled')) continue;
  const style = getComputedStyle(node), drawn = node instanceof SVGElement ? style.fill : style.color;
  const [low, high] = [light(drawn), light(behind(node))].sort((a, b) => a - b);
  seen += 1;
  if ((high + .05) / (low + .05) < 4.5) found.push(`${node.tagName} ${node.textContent.slice(0, 40)}`);
}
return [found, seen]
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("place", ["", "#0"])
def test_contrast(browser: Browser, tmp_path: Path, scheme: str, place: str) -> None:
    digest = write_task(tmp_path / "tasks", "t0", {"x": 1, "y": [2], "w": 1})
    known = {"items": [*ITEMS, {"type": "new"}], "answer": {"x": 1, "z": 3, "w": 2}, "task_digest": digest}
    results = [result(f"t{n}", n % 2, n / 10 if n else None, error="wrong", **known) for n in range(11)]
    browser.open_page(page(tmp_path, results), scheme=scheme, place=place)
    faint, seen = browser.run(FAINT)
    assert faint == [] and seen > 20
    dark = browser.run("return matchMedia('(prefers-color-scheme: dark)').matches")
    background = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (dark, background) == ((True, "rgb(20, 23, 27)") if scheme == "dark" else (False, "rgb(255, 255, 255)"))


def test_control_faint_text_is_found(browser: Browser, mixed: Path) -> None:
    browser.open_page(mixed)
    browser.run(
        "document.querySelector('h1').setAttribute('id', 'x'); document.styleSheets[0].insertRule('#x {color: #999}')"
    )
    faint, _ = browser.run(FAINT)
    assert [words.split()[0] for words in faint] == ["H1"]


@pytest.mark.parametrize("place", ["", "#0"])
def test_a_phone_scrolls_down_only(browser: Browser, tmp_path: Path, place: str) -> None:
    word = "W" * 300
    items = [*ITEMS, {"type": "command_execution", "command": word, "output": word, "exit_code": 0, "cwd": word}]
    known = {"items": [*items, {"type": word, word: word}], "answer": {word: word}, "error": word}
    options = {"samples": 1, "tasks": 12}
    results = [
        result(f"task-{n}-{'x' * 60}", 0, 1.0, "codex", f"model-{m}-{'y' * 60}", options=options, **known)
        for n in range(12)
        for m in range(6)
    ]
    browser.open_page(page(tmp_path, results), size=PHONE, place=place)
    assert browser.run("return [innerWidth, document.documentElement.scrollWidth]") == [375, 375]
    wide = """return [...document.querySelectorAll('body *')].filter(node => node.checkVisibility()
        && !node.closest('.scroll, svg, .keys thead, #list thead') && node.getBoundingClientRect().right > 376)
        .map(node => node.outerHTML.slice(0, 100))"""
    assert browser.run(wide) == []


def test_every_control_has_a_name(browser: Browser, mixed: Path) -> None:
    browser.open_page(mixed)
    nodes = browser.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    roles = ("button", "link", "combobox", "searchbox", "checkbox", "region", "navigation", "search")
    names = [(node["role"]["value"], node.get("name", {}).get("value")) for node in nodes if not node.get("ignored")]
    assert {role for role, _ in names} >= set(roles)
    assert [role for role, name in names if role in roles and not name] == []
