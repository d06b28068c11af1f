"use strict";
// Filters the list of rollouts and shows one of them. What an agent wrote becomes text nodes only: no markup, no link,
// no style is ever made of it, and characters that cannot be seen are spelt out. A rollout is unpacked when it is opened,
// and lists are shown in pieces, so that the size of a run does not matter.

const ROWS = 100; // of the list, at a time
const ITEMS = 200; // of a timeline
const CHARACTERS = 20000; // of one text
const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;

const find = (id) => document.getElementById(id);

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function spelt(character) {
  if (character === "\n" || character === "\t") return character;
  const code = character.codePointAt(0).toString(16);
  return code.length > 4 ? `\\u{${code}}` : `\\u${code.padStart(4, "0")}`;
}

const visible = (text) => text.replace(HIDDEN, spelt);
const textOf = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 2) ?? "");
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

async function unpack(base64) {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

// --- Texts and items

function button(label, act) {
  const node = el("button", { type: "button", class: "more" }, label);
  node.addEventListener("click", act);
  return node;
}

function block(value, kind = "") {
  const text = textOf(value);
  const scrolls = text.length > 1500 || text.split("\n", 21).length > 20; // then keys must reach it, too
  const pre = el("pre", { class: kind, ...(scrolls ? { tabindex: "0" } : {}) });
  if (text.length <= CHARACTERS) {
    pre.append(visible(text));
    return pre;
  }
  pre.append(visible(text.slice(0, CHARACTERS)));
  const more = button(`Show all ${text.length.toLocaleString("en")} characters`, () => {
    pre.textContent = visible(text);
    pre.focus();
    more.remove();
  });
  return el("div", {}, pre, more);
}

function raw(item) {
  const node = el("details", {}, el("summary", {}, "as recorded"));
  node.addEventListener("toggle", () => node.append(block(item)), { once: true });
  return node;
}

function parts(content) {
  const list = Array.isArray(content) ? content : [content];
  return list.map((part) => block(isObject(part) && typeof part.text === "string" ? part.text : part));
}

function known(members) {
  return members.filter((member) => typeof member === "string" || typeof member === "number").join(" · ");
}

const KINDS = new Map([
  ["message", (item) => [known([item.role, "message", item.phase]), parts(item.content)]],
  ["agent_message", (item) => ["message between agents", parts(item.content)]],
  ["reasoning", (item) => ["reasoning", parts(item.summary)]],
  ["command_execution", (item) => [
    known(["command", item.exit_code === null || item.exit_code === undefined ? item.status : `exit code ${textOf(item.exit_code)}`,
      typeof item.duration_ms === "number" ? `${item.duration_ms} ms` : null, item.cwd]),
    [block(item.command), ...(item.output ? [block(item.output, "output")] : [])],
  ]],
  ["function_call", (item) => [known(["call", item.name, item.status]), [block(item.arguments)]]],
  ["function_call_output", (item) => ["result of a call", [block(item.error ?? item.output, "output")]]],
  ["mcp_call", (item) => [
    known(["call", item.server_label, item.name, item.status]),
    [block(item.arguments), block(item.error ?? item.output, "output")],
  ]],
]);

function showItem(item) {
  const render = isObject(item) && KINDS.get(item.type);
  const kind = render ? item.type : "unknown";
  const [title, body] = render ? render(item) : [textOf(isObject(item) ? item.type ?? "item" : "item"), [block(item)]];
  const failed = kind === "command_execution" && item.exit_code ? " failed" : "";
  return el("li", { class: `item ${kind}${failed}` }, el("h4", {}, visible(title)), ...body, ...(render ? [raw(item)] : []));
}

function showItems(items) {
  const list = el("ol", { class: "timeline" });
  const box = el("div", {}, list);
  let shown = 0;
  const next = () => {
    list.append(...items.slice(shown, shown + ITEMS).map(showItem));
    shown = Math.min(items.length, shown + ITEMS);
    more.textContent = `Show more of ${items.length - shown} items`;
    more.hidden = shown === items.length;
  };
  const more = button("", next);
  next();
  box.append(more);
  return box;
}

// --- One rollout

function showKeys(keys) {
  const heads = ["Key", "Expected", "Answer", "Verdict"];
  const body = el("tbody", {});
  for (const [key, expected, answer, verdict] of keys) {
    const word = { extra: "not asked for" }[verdict] ?? verdict;
    body.append(el("tr", {}, el("th", { scope: "row" }, visible(key)),
      el("td", { "data-name": heads[1] }, ...(expected === null ? [] : [block(expected)])),
      el("td", { "data-name": heads[2] }, ...(answer === null ? [] : [block(answer)])),
      el("td", { "data-name": heads[3], class: verdict }, word)));
  }
  const head = el("tr", {}, ...heads.map((name) => el("th", { scope: "col" }, name)));
  return el("table", { class: "keys" }, el("thead", {}, head), body);
}

function showFacts(facts) {
  return el("dl", {}, ...facts.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, visible(text))]));
}

function links(row) {
  const place = chosen.indexOf(row);
  const nav = el("nav", { "aria-label": "Rollouts" }, el("a", { href: "#" }, "← All rollouts"));
  for (const [other, label] of [[chosen[place - 1], "Previous"], [place < 0 ? undefined : chosen[place + 1], "Next"]]) {
    if (other) nav.append(el("a", { href: `#${other.line}` }, label));
  }
  return nav;
}

async function showRollout(row) {
  const article = find("rollout");
  const mine = (opened += 1);
  article.removeAttribute("data-line");
  article.replaceChildren(links(row), el("h2", { id: "h-rollout", tabindex: "-1" }, visible(title(row))));
  const detail = await unpack(details[row.line]);
  if (mine !== opened) return; // another one was opened meanwhile
  article.append(el("p", {}, badge(row), ` ${row.status}`));
  if (detail.error) article.append(el("h3", {}, "Error"), block(detail.error, "failed"));
  article.append(el("h3", {}, "Answer"));
  if (detail.note) article.append(el("p", { class: "faint" }, visible(detail.note)));
  if (detail.answer !== null) article.append(block(detail.answer));
  if (detail.keys.length) article.append(showKeys(detail.keys));
  article.append(el("h3", {}, `Timeline, ${detail.items.length} items`), showItems(detail.items));
  article.append(el("h3", {}, "Record"), showFacts(detail.facts));
  article.setAttribute("data-line", row.line);
}

// --- The list

let rows = [];
let details = [];
let names = { tasks: [], pairs: [] };
let chosen = []; // the rows that the filters leave
let first = 0; // of the page of the list
let scrolled = 0; // where the list was left
let opened = 0; // rollouts so far

function title(row) {
  const attempt = row.attempts > 1 ? `, attempt ${row.attempt} of ${row.attempts}` : "";
  return `${names.tasks[row.task]}, ${names.pairs[row.pair]}, sample ${row.sample}${attempt}`;
}

function badge(row) {
  const measured = row.reward !== null;
  const grade = measured ? `r${Math.round(Math.min(1, Math.max(0, row.reward)) * 10)}` : "none";
  return el("span", { class: `badge ${grade}` }, measured ? `reward ${Number(row.reward.toFixed(3))}` : "not measured");
}

function listRow(row) {
  const cells = [
    ["Harness · model", names.pairs[row.pair]],
    ["Sample", row.attempts > 1 ? `${row.sample}, attempt ${row.attempt} of ${row.attempts}` : `${row.sample}`],
    ["Status", row.status], ["Reward", badge(row)], ["Seconds", row.seconds.toFixed(1)],
    ["Tokens", row.tokens === null ? "unknown" : row.tokens.toLocaleString("en")], ["Error", visible(row.error)],
  ];
  const link = el("a", { href: `#${row.line}` }, visible(names.tasks[row.task]));
  return el("tr", {}, el("td", { "data-name": "Task" }, link),
    ...cells.map(([name, value]) => el("td", { "data-name": name }, ...(value === "" ? [] : [value]))));
}

function rewardFits(reward, wanted) {
  if (wanted === "null") return reward === null;
  if (wanted === "part") return reward !== null && reward > 0 && reward < 1;
  return reward === Number(wanted);
}

function filter() {
  const form = find("filters").elements;
  const text = form.text.value.trim().toLowerCase();
  chosen = rows.filter((row) =>
    (row.counts || form.every.checked)
    && (form.task.value === "" || row.task === Number(form.task.value))
    && (form.pair.value === "" || row.pair === Number(form.pair.value))
    && (form.status.value === "" || row.status === form.status.value)
    && (form.reward.value === "" || rewardFits(row.reward, form.reward.value))
    && (text === "" || row.search.includes(text)));
  first = 0;
  showList();
}

function showList() {
  const last = Math.min(first + ROWS, chosen.length);
  find("list").tBodies[0].replaceChildren(...chosen.slice(first, last).map(listRow));
  const range = chosen.length ? `${first + 1} to ${last} of ${chosen.length.toLocaleString("en")}` : "None";
  find("count").textContent = `${range} of ${rows.length.toLocaleString("en")} attempts recorded`;
  find("before").disabled = first === 0;
  find("after").disabled = last === chosen.length;
}

function turnPage(step) {
  first += step * ROWS;
  showList();
  find("h-rollouts").scrollIntoView();
}

function fillSelect(name, options) {
  const select = find("filters").elements[name];
  for (const [value, label] of options) select.append(el("option", { value }, visible(label)));
}

function showOnly(button) {
  find("filters").reset();
  find("filters").elements.task.value = button.dataset.task;
  find("filters").elements.pair.value = button.dataset.pair;
  filter();
  find("h-rollouts").scrollIntoView();
}

async function route() {
  const number = /^#\d+$/.test(location.hash) ? Number(location.hash.slice(1)) : -1;
  const row = rows.find((candidate) => candidate.line === number);
  if (row && find("rollout").hidden) scrolled = window.scrollY;
  find("rollout").hidden = !row;
  find("overview").hidden = Boolean(row);
  if (!row) {
    opened += 1;
    find("rollout").replaceChildren();
    window.scrollTo(0, scrolled);
    return;
  }
  await showRollout(row);
  find("h-rollout").focus({ preventScroll: true });
  window.scrollTo(0, 0);
}

async function start() {
  const index = await unpack(find("index").textContent);
  details = find("details").textContent.trim().split("\n");
  names = { tasks: index.tasks, pairs: index.pairs };
  rows = index.rows.map((row) => ({ ...row, search: `${names.tasks[row.task]} ${row.error}`.toLowerCase() }));
  fillSelect("task", names.tasks.map((name, number) => [number, name]));
  fillSelect("pair", names.pairs.map((name, number) => [number, name]));
  fillSelect("status", [...new Set(rows.map((row) => row.status))].sort().map((status) => [status, status]));
  find("filters").addEventListener("input", filter);
  find("filters").addEventListener("submit", (event) => event.preventDefault());
  find("before").addEventListener("click", () => turnPage(-1));
  find("after").addEventListener("click", () => turnPage(1));
  for (const cell of document.querySelectorAll(".heat button")) cell.addEventListener("click", () => showOnly(cell));
  window.addEventListener("hashchange", route);
  filter();
  await route();
  document.body.setAttribute("data-ready", "");
}

window.addEventListener("unhandledrejection", (event) => {
  find("trouble").textContent = `The rollouts cannot be shown: ${event.reason}`;
});
start();
