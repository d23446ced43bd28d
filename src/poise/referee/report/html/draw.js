// Small tools: elements, numbers, the tooltip, the theme. Text is never parsed as HTML, and all characters are visible.

const COLOURS = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7"];
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
const known = (value) => value !== null && value !== undefined;
const large = (value) => (known(value) ? Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(value) : "–");
const place = (x) => (Number.isInteger(x) ? String(x) : exactly(x));
const short = (x) => (x >= 1e6 ? `${exactly(x / 1e6)}M` : x >= 1e4 ? `${exactly(x / 1e3)}k` : exactly(x)); // for the ticks of an axis
const exactly = (value) => (value === undefined || Number.isNaN(value) ? "–" : String(Number(value.toPrecision(7))));
const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(value < 0.0995 && value > -0.0995 ? 1 : 0)} %`);

// Replaces invisible characters by a visible escape: control and format characters, lone surrogates, unassigned code
// points, and characters without a glyph (variation selectors, fillers, tags). `el` and `svg` do this to every text.
const HIDDEN = /[\p{C}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}]/gu;
const escaped = (code) => (code > 0xffff ? `\\U${code.toString(16).padStart(8, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`);
const visible = (text) => text.replace(HIDDEN, (c) => (c === "\t" || c === "\n" ? c : escaped(c.codePointAt(0))));

// The tooltip. It appears next to the text or figure that it explains, so that it covers no neighbours; without room
// there, at the farther edge of the window. After Escape it stays closed until the reader points at something else.
const tip = {
  about: null, closed: null,
  show(event, ...content) {
    if (event.target === this.closed) return;
    this.about = event.target;
    this.closed = null;
    const box = document.getElementById("tip");
    box.replaceChildren(...content);
    box.hidden = false;
    const { offsetWidth: w, offsetHeight: h } = box, [wide, high] = [innerWidth, innerHeight];
    const around = (event.target.closest(".tokens, svg") || event.target).getBoundingClientRect();
    const level = Math.max(4, Math.min(event.clientY - h / 2, high - h - 4)), centre = Math.max(4, Math.min(event.clientX - w / 2, wide - w - 4));
    const [x, y] = [[around.right + 8, level], [around.left - w - 8, level], [centre, around.bottom + 6], [centre, around.top - h - 6]]
      .find(([left, top]) => left >= 4 && left + w <= wide - 4 && top >= 4 && top + h <= high - 4) || [centre, event.clientY < high / 2 ? high - h - 4 : 4];
    Object.assign(box.style, { left: `${x}px`, top: `${y}px` });
  },
  hide() { document.getElementById("tip").hidden = true; },
  close() { if (!document.getElementById("tip").hidden) { this.closed = this.about; this.hide(); } },
  list(pairs) { return el("dl", {}, pairs.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])); },
};

addEventListener("keydown", (event) => { if (event.key === "Escape") tip.close(); });

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

// Room for the labels on the left of a figure, and a label below it: both stay inside, however long they are.
const WIDE = 6.4; // the most pixels that a character needs
const margin = (labels) => Math.max(40, 10 + WIDE * Math.max(0, ...labels.map((label) => label.length)));
function upright(x, y, label, width) {
  const half = (WIDE * String(label).length) / 2;
  return svg("text", { x: Math.max(half, Math.min(x, width - half)), y, "text-anchor": "middle" }, label);
}

// A line's mark in a legend, with the line's dashes.
function mark(shade, dash = "") {
  let at = 0;
  const stops = dash.split(" ").filter(Boolean).map((length, i) => `${i % 2 ? "transparent" : shade} ${at}px ${at += Number(length)}px`);
  return el("i", { class: dash && "dashed", style: { background: dash ? `repeating-linear-gradient(90deg, ${stops.join(", ")})` : shade } });
}

// Downloads rows as comma-separated values. Text that a spreadsheet would read as a formula is escaped.
function saveTable(name, rows) {
  const cell = (value) => (value === null || value === undefined ? "" : typeof value === "number" ? String(value)
    : `"${String(value).replace(/^[=+\-@\t\r]/, "'$&").replaceAll('"', '""')}"`);
  const address = URL.createObjectURL(new Blob([rows.map((row) => `${row.map(cell).join(",")}\r\n`).join("")], { type: "text/csv" }));
  el("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
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

// Sets the last chosen theme, or the system's, and lets the button change the theme.
function useTheme() {
  let kept = null;
  try { kept = localStorage.getItem("poise-theme"); } catch { /* pages opened from disk may have no storage */ }
  theme(kept || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () =>
    theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
}
