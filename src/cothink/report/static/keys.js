// Keys, the theme, values under the pointer; loaded after view.js, and starts the page.
"use strict";

function mark(place) {
  const lines = [...main.querySelectorAll(".list > li")];
  lines.forEach((line, k) => line.classList.toggle("here", k === place));
  state.here = place;
  if (lines[place]) lines[place].scrollIntoView({ block: "nearest" });
}

function move(by) {
  const lines = [...main.querySelectorAll(".list > li")];
  if (!lines.length) return;
  mark(Math.max(0, Math.min(lines.length - 1, state.here + by)));
  if (lines[state.here].closest("#episodes")) lines[state.here].click();
}

const KEYS = {
  j: () => move(1),
  k: () => move(-1),
  Enter: () => (document.activeElement.closest(".list > li") || main.querySelectorAll(".list > li")[state.here])?.click(),
  "/": () => main.querySelector('input[type="search"]')?.focus(),
  "?": () => document.getElementById("keys").showModal(),
  d: theme,
  n: () => main.querySelector(".more:not([hidden])")?.click(),
  t: flipView,
  u: () => (main.querySelector(".split.open #back")?.offsetParent ? main.querySelector("#back").click() : (location.hash = "")),
};

document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input[type=search], input[type=number], select, textarea");
  if (typing && event.key === "Escape") event.target.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey || document.getElementById("keys").open) return;
  if (event.key === "Enter" && event.target.matches("a, button, summary, input")) return;
  const tab = Object.keys(TABS)[Number(event.key) - 1];
  const work = tab && state.route.run ? () => { location.hash = address({ run: state.route.run, tab }); } : KEYS[event.key];
  if (work) {
    event.preventDefault();
    work();
  }
});

function theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
  setTheme(now === "dark" ? "light" : "dark");
}

function setTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  try {
    if (name) localStorage.setItem("theme", name);
  } catch (error) {
    console.warn("the theme is not kept:", error.message);
  }
}

function values(event) {
  const plot = event.target.closest?.(".plot");
  const tip = document.getElementById("tip");
  if (!plot) {
    tip.hidden = true;
    return;
  }
  const [x0, x1, y0, y1, left, right, top, bottom, log] = plot.dataset.frame.split(" ").map(Number);
  const box = plot.getBoundingClientRect();
  const at = ((event.clientX - box.left) / box.width) * plot.viewBox.baseVal.width;
  const curves = [...plot.querySelectorAll("path[data-name]")].map((path) => {
    const points = path.getAttribute("d").slice(1).split(" L").map((p) => p.split(",").map(parseFloat));
    return { name: path.dataset.name, near: points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a)) };
  });
  const x = curves.reduce((best, c) => (Math.abs(c.near[0] - at) < Math.abs(best - at) ? c.near[0] : best), Infinity);
  const step = x0 + ((x - left) / (right - left)) * (x1 - x0);
  const lines = curves.filter((c) => Math.abs(c.near[0] - x) < 8).map((c) => {
    const y = y0 + ((bottom - c.near[1]) / (bottom - top)) * (y1 - y0);
    return `${c.name}: ${(log ? 10 ** y : y).toPrecision(3)}`;
  });
  tip.hidden = !lines.length;
  tip.textContent = [`step ${Math.round(step)}`, ...lines].join("\n");
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
}

document.addEventListener("pointermove", values);
document.getElementById("theme").addEventListener("click", theme);
document.getElementById("help").addEventListener("click", KEYS["?"]);
addEventListener("hashchange", go);
try {
  setTheme(localStorage.getItem("theme"));
} catch (error) {
  console.warn("no theme is kept here:", error.message);
}
go();
