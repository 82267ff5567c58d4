// The viewer's page. Fragments that come as `html` were written and escaped by the server; all other text is set as text.
"use strict";

const main = document.getElementById("main");
const state = { route: {}, here: -1, view: "", timer: 0, seen: "", start: "0:0", chosen: new Set(), turn: 0, again: null };

// ---------------------------------------------------------------- small tools
function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key in node && key !== "list") node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

async function ask(path, query = {}) {
  const words = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== "" && one !== null && one !== undefined) words.append(key, one);
    }
  }
  const answer = await fetch(`/api/${path}?${words}`);
  const found = await answer.json();
  if (!answer.ok) throw new Error(typeof found.detail === "string" ? found.detail : JSON.stringify(found.detail));
  return found;
}

function guard(work) {
  return async (...given) => {
    const turn = state.turn;
    try {
      await work(...given);
    } catch (error) {
      if (turn === state.turn) main.prepend(make("p", { className: "error" }, error.message));
    }
  };
}

function address(route) {
  return "#" + new URLSearchParams(route);
}

function fragment(html) {
  const node = make("div");
  node.innerHTML = html;
  return node;
}

function shown(value, digits = 3) {
  return typeof value === "number" ? value.toFixed(digits) : "";
}

// ---------------------------------------------------------------- routes
async function go() {
  clearInterval(state.timer);
  Object.assign(state, { route: Object.fromEntries(new URLSearchParams(location.hash.slice(1))), here: -1, seen: "", again: null });
  state.turn += 1;
  main.replaceChildren();
  document.getElementById("where").textContent = state.route.b
    ? `${state.route.a} against ${state.route.b}` : state.route.run || "";
  const page = state.route.b ? comparison : state.route.run ? one : list;
  await guard(page)();
}

function live(work, seconds) {
  const turn = state.turn;
  state.timer = setInterval(async () => {
    if (document.hidden || turn !== state.turn) return;
    try {
      await work();
      document.getElementById("lost").hidden = true;
    } catch (error) {
      document.getElementById("lost").hidden = false; // and the next call tries again
      document.getElementById("lost").title = error.message;
    }
  }, seconds * 1000);
}

// ---------------------------------------------------------------- the list of runs
async function list() {
  const turn = state.turn;
  const rows = make("ol", { className: "list runs" });
  const button = make("button", { id: "compare", onclick: compare }, "compare two");
  const folder = make("span", { className: "soft" });
  main.append(make("div", { className: "filters" }, button, folder), rows);
  let before = "";
  async function refresh() {
    const found = await ask("runs");
    if (turn !== state.turn || JSON.stringify(found) === before) return;
    before = JSON.stringify(found);
    folder.textContent = `${found.runs.length} runs in ${found.folder}`;
    rows.replaceChildren(...found.runs.map(runLine));
    mark(state.here);
  }
  await refresh();
  live(refresh, 3);
}

function runLine(run) {
  const box = make("input", { type: "checkbox", checked: state.chosen.has(run.name), ariaLabel: `compare ${run.name}` });
  box.addEventListener("click", (event) => event.stopPropagation());
  box.addEventListener("change", () => (box.checked ? state.chosen.add(run.name) : state.chosen.delete(run.name)));
  const link = make("a", { href: address({ run: run.name }) }, run.name);
  link.addEventListener("click", (event) => event.stopPropagation());
  return make("li", { onclick: () => link.click() },
    box, make("b", {}, link), make("span", { className: `status ${run.status}` }, run.status),
    make("span", { className: "soft" }, run.progress || ""),
    make("span", { className: "soft" }, "reward" in run && run.reward !== null ? `reward ${shown(run.reward)}` : ""),
    make("span", { className: "soft" }, [run.result, run.alarms ? `${run.alarms} steps with warnings` : ""].filter(Boolean).join(", ")));
}

function compare() {
  const [a, b] = [...state.chosen];
  if (state.chosen.size === 2) location.hash = address({ a, b });
  else alertLine("tick the boxes of two runs first");
}

function alertLine(words) {
  main.querySelector(".error")?.remove();
  main.prepend(make("p", { className: "error" }, words));
}

// ---------------------------------------------------------------- one run
const TABS = { curves, episodes, evaluations, about };

async function one() {
  const tab = state.route.tab || "curves";
  const links = Object.keys(TABS).map((name) => make("a",
    { href: address({ run: state.route.run, tab: name }), ariaCurrent: String(name === tab) }, name));
  main.append(make("nav", { className: "tabs" }, ...links));
  await (TABS[tab] || curves)();
}

async function curves() {
  await charts([state.route.run]);
}

async function charts(runs) {
  const turn = state.turn;
  const place = make("div", { id: "curves" });
  main.append(place);
  async function refresh() {
    const found = await ask("curves", { run: runs, seen: state.seen });
    if (turn !== state.turn || found.html === undefined) return;
    state.seen = found.version;
    place.innerHTML = found.html || '<p class="note">No metrics yet; this page looks again every two seconds.</p>';
  }
  await refresh();
  live(refresh, 2);
}

async function about() {
  const turn = state.turn;
  const found = await ask("run", { run: state.route.run });
  if (turn === state.turn) main.append(fragment(found.html));
}

async function evaluations() {
  const turn = state.turn;
  const found = await ask("run", { run: state.route.run });
  if (turn === state.turn) main.append(fragment(found.evaluations || '<p class="note">No evaluation is done yet.</p>'));
}

// ---------------------------------------------------------------- episodes
const KINDS = {
  verdict: ["", "right", "wrong", "unparsable", "error", "failed"],
  flip: ["", "any", "fixed", "spoilt", "changed"],
};

async function episodes() {
  const turn = state.turn;
  let about = await ask("stages", { run: state.route.run });
  if (turn !== state.turn) return;
  const stages = Object.keys(about.stages);
  if (!stages.length) {
    main.append(make("p", { className: "note" }, "No episodes yet."));
    return;
  }
  const select = (name, values, words = (v) => v || "any") =>
    make("select", { name }, ...values.map((v) => make("option", { value: v }, words(v))));
  const form = make("form", { className: "filters", onsubmit: (event) => event.preventDefault() },
    make("label", {}, "stage", select("stage", stages)),
    make("label", {}, "step", select("step", [])),
    make("label", {}, "verdict", select("verdict", KINDS.verdict)),
    make("label", {}, "answer", select("flip", KINDS.flip, (v) => ({ "": "-", any: "flipped" })[v] || v)),
    make("label", {}, "role", select("role", ["", ...about.roles])),
    make("label", {}, make("input", { type: "checkbox", name: "truncated" }), "truncated"),
    make("label", {}, "reward", make("input", { type: "number", step: "any", name: "low", placeholder: "from" }),
      make("input", { type: "number", step: "any", name: "high", placeholder: "to" })),
    make("input", { type: "search", name: "words", placeholder: "words ( / )", maxLength: 500, ariaLabel: "words" }));
  const rows = make("ol", { className: "list", id: "episodes" });
  const more = make("button", { className: "more", onclick: guard(load) }, "more");
  const count = make("p", { className: "note" });
  const reading = make("div", { className: "reading" });
  const split = make("div", { className: "split" }, make("div", { className: "listing" }, rows, count, more), reading);
  main.append(form, split);
  form.elements.stage.value = stages.includes(state.route.stage) ? state.route.stage
    : stages.findLast((s) => s.endsWith("-rl")) || stages.at(-1);
  let read = 0;
  let lost = 0;
  let request = 0;

  function steps() {
    const found = about.stages[form.elements.stage.value] || [];
    form.elements.step.replaceChildren(...[...found].reverse().map((v) => make("option", { value: v }, String(v))));
    if (found.length > 1) form.elements.step.append(make("option", { value: "" }, "all"));
  }

  async function grown() { // later steps of a run that trains; the one that is read stays
    const found = await ask("stages", { run: state.route.run });
    if (turn !== state.turn || JSON.stringify(found) === JSON.stringify(about)) return;
    about = found;
    const added = Object.keys(found.stages).filter((name) => !stages.includes(name));
    stages.push(...added);
    form.elements.stage.append(...added.map((name) => make("option", { value: name }, name)));
    const step = form.elements.step.value;
    steps();
    form.elements.step.value = step;
  }

  async function load() {
    const mine = ++request;
    const given = Object.fromEntries(new FormData(form));
    const query = { ...given, truncated: form.elements.truncated.checked, run: state.route.run, start: state.start };
    const found = await ask("episodes", query);
    if (turn !== state.turn || mine !== request) return;
    read += found.read;
    for (const item of found.items) {
      const stage = form.elements.stage.value;
      const line = make("li", { tabIndex: 0, onclick: () => open(line, item, stage) });
      line.append(...(form.elements.step.value ? [] : [make("span", { className: "soft" }, `step ${item.step} `)]));
      line.append(...fragment(item.html).childNodes);
      rows.append(line);
    }
    state.start = found.then;
    more.hidden = found.then === null;
    more.textContent = "more";
    lost += found.unreadable;
    count.textContent = `${rows.children.length} of ${read} episodes read${found.then === null ? "" : " so far"}`
      + (lost ? `; ${lost} lines could not be read` : "");
  }

  const open = guard(async (line, item, stage, whole = false) => {
    mark([...rows.children].indexOf(line));
    const query = { run: state.route.run, stage, step: item.step, offset: item.offset, view: state.view, whole };
    const found = await ask("episode", query);
    if (turn !== state.turn) return;
    state.again = () => open(line, item, stage, whole);
    const back = make("button", { id: "back", onclick: () => split.classList.remove("open") }, "back to the list");
    const toggle = make("button", { onclick: flipView }, "chat or tree (t)");
    const all = make("button", { onclick: () => open(line, item, stage, true) }, "whole texts");
    reading.replaceChildren(make("div", { className: "tools" }, back, toggle, all), fragment(found.html));
    reading.scrollTop = 0;
    split.classList.add("open");
  });

  const renew = guard(async () => {
    state.here = -1;
    state.start = "0:0";
    read = lost = 0;
    rows.replaceChildren();
    reading.replaceChildren();
    split.classList.remove("open");
    await load();
  });

  form.elements.stage.addEventListener("change", steps);
  form.addEventListener("change", renew);
  let typing = 0;
  form.elements.words.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(renew, 300); });
  steps();
  await renew();
  if (turn === state.turn) live(grown, 4);
}

function flipView() {
  const now = main.querySelector(".episode")?.classList.contains("tree") ? "tree" : "chat";
  state.view = now === "tree" ? "chat" : "tree";
  state.again?.();
}

// ---------------------------------------------------------------- two runs
async function comparison() {
  const turn = state.turn;
  const { a, b } = state.route;
  const found = await ask("compare", { a, b });
  if (turn !== state.turn) return;
  main.append(fragment(found.html), make("h2", {}, "Curves"));
  await charts([a, b]);
  if (turn !== state.turn) return;
  main.append(make("h2", {}, "Evaluations"), fragment(found.evaluations || '<p class="note">None yet.</p>'));
  if (found.labels.length) await pairs(a, b, found.labels);
}

async function pairs(a, b, labels) {
  const turn = state.turn;
  const label = make("select", { name: "label" }, ...labels.map((v) => make("option", {}, v)));
  const differ = make("input", { type: "checkbox", checked: true });
  const rows = make("ol", { className: "list", id: "pairs" });
  const more = make("button", { className: "more", onclick: guard(load) }, "more");
  main.append(make("h2", {}, "The same questions"),
    make("div", { className: "filters" }, make("label", {}, "evaluation", label), make("label", {}, differ, "only other verdicts")),
    rows, more);
  let start = "0:0";
  let request = 0;
  async function load() {
    const mine = ++request;
    const asked = label.value;
    const found = await ask("pairs", { a, b, label: asked, differ: differ.checked, start });
    if (turn !== state.turn || mine !== request) return;
    for (const item of found.items) {
      const line = make("li", { tabIndex: 0, onclick: () => open(line, item, asked) }, ...fragment(item.html).childNodes);
      rows.append(line);
    }
    start = found.then;
    more.hidden = start === null;
    if (!rows.children.length) rows.append(make("p", { className: "note" }, "None here."));
  }
  const open = guard(async (line, item, asked) => {
    mark([...rows.children].indexOf(line));
    const old = line.querySelector(".both");
    if (old) {
      old.remove();
      return;
    }
    const found = await ask("pair", { a, b, label: asked, first: item.a, second: item.b });
    const side = (name, html) => make("div", {}, make("h3", {}, name), fragment(html));
    const both = make("div", { className: "both" }, side(a, found.a), side(b, found.b));
    both.addEventListener("click", (event) => event.stopPropagation());
    line.append(both);
  });
  const renew = guard(async () => { start = "0:0"; rows.replaceChildren(); await load(); });
  label.addEventListener("change", renew);
  differ.addEventListener("change", renew);
  await load();
}
