// Small tools: elements, numbers, the tooltip, the theme. Text is only ever set as text, and all its characters are visible.

const COLOURS = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];
const DASHES = ["", "5 3", "2 3", "8 3 2 3", "1 4", "9 5"];
const SVG = "http://www.w3.org/2000/svg";
const colour = (i) => `var(${COLOURS[i % COLOURS.length]})`;

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : name === "aria-label" ? visible(value) : value);
  }
  const there = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  element.append(...there.map((child) => (child instanceof Node ? child : visible(String(child)))));
  return element;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}
const place = (x) => (Number.isInteger(x) ? String(x) : exactly(x));
const short = (x) => (x >= 1e6 ? `${exactly(x / 1e6)}M` : x >= 1e4 ? `${exactly(x / 1e3)}k` : exactly(x)); // for the ticks of an axis
const exactly = (value) => (value === undefined || Number.isNaN(value) ? "–" : String(Number(value.toPrecision(7))));
const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(value < 0.0995 && value > -0.0995 ? 1 : 0)} %`);

// Replaces invisible characters by a visible escape: control and format characters, lone surrogates, unassigned code
// points, and those that fonts leave out (variation selectors, fillers, tags). `el` and `svg` do this to every text.
const HIDDEN = /[\p{C}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}]/gu;
const escaped = (code) => (code > 0xffff ? `\\U${code.toString(16).padStart(8, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`);
const visible = (text) => text.replace(HIDDEN, (c) => (c === "\t" || c === "\n" ? c : escaped(c.codePointAt(0))));

const tip = {
  show(event, ...content) {
    const box = document.getElementById("tip");
    box.replaceChildren(...content);
    box.hidden = false;
    const { offsetWidth: w, offsetHeight: h } = box;
    box.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - w - 6))}px`;
    box.style.top = `${event.clientY + 18 + h > innerHeight ? Math.max(4, event.clientY - h - 12) : event.clientY + 18}px`;
  },
  hide() { document.getElementById("tip").hidden = true; },
  list(pairs) { return el("dl", {}, pairs.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])); },
};

const most = (values) => values.reduce((high, v) => (Number.isFinite(v) ? Math.max(high, Math.abs(v)) : high), 0) || 1; // never 0, since callers divide by it
const extent = (values) => values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);

// Round numbers between low and high, for the ticks of an axis.
function ticks(low, high, about = 4) {
  const raw = Math.max((high - low) / about, 1e-9 * Math.max(Math.abs(low), Math.abs(high))) || 1; // rounding would lose a finer step
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= raw);
  const found = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-9; t += step) found.push(Math.abs(t) < step / 1e6 ? 0 : t);
  return found;
}

function card(title, note, ...content) {
  return el("section", { class: "card" }, el("h3", {}, title), note && el("p", {}, note), content);
}

const table = (head, rows) => el("div", { class: "scroll" }, el("table", {},
  el("thead", {}, el("tr", {}, head.map((text) => el("th", { scope: "col" }, text)))),
  el("tbody", {}, rows.map((cells) => el("tr", {}, cells.map((cell) =>
    el("td", { class: typeof cell === "number" && "number" }, typeof cell === "number" ? number(cell) : cell)))))));

function theme(wanted) {
  document.documentElement.dataset.theme = wanted;
  try { localStorage.setItem("poise-theme", wanted); } catch { /* pages opened from disk may have no storage */ }
}

// Sets the theme that was chosen last, or the system's, and lets the button change it.
function useTheme() {
  let kept = null;
  try { kept = localStorage.getItem("poise-theme"); } catch { /* pages opened from disk may have no storage */ }
  theme(kept || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () =>
    theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
}
