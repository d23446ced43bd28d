// One chart of curves. The charts of a page share a group: x axis, crosshair and zoom.

// The shared state of a page's charts. `hidden` has the keys of lines that the reader has hidden.
class Group {
  constructor() { Object.assign(this, { charts: [], range: null, smooth: 0, log: { x: false, y: false }, hidden: new Set() }); }
  draw() { for (const chart of this.charts) chart.draw(); }
  zoom(range) { this.range = range; this.draw(); }
  point(x) { for (const chart of this.charts) chart.point(x); }
  chart(lines, size) {
    const chart = new Chart(lines, this, size);
    this.charts.push(chart);
    return chart;
  }
}

// Maps a value to a position between two ends, and back. A logarithmic axis needs values above 0.
function axis(low, high, log, from, to) {
  const f = log ? Math.log10 : (v) => v, a = f(low), b = f(high) === a ? a + 1 : f(high);
  return {
    at: (v) => from + ((f(v) - a) / (b - a)) * (to - from),
    of: (place) => { const v = a + ((place - from) / (to - from)) * (b - a); return log ? 10 ** v : v; },
    ticks: (about) => (log ? powers(low, high) : ticks(low, high, about)),
  };
}

// Ticks of a logarithmic axis: powers of ten, with 2 and 5 between them if there is room; a short axis has linear ticks.
function powers(low, high) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const steps = last - first > 3 ? [1] : [1, 2, 5], every = Math.ceil((last - first) / 6);
  const found = Array.from({ length: Math.floor((last - first) / every) + 1 }, (_, i) => first + i * every)
    .flatMap((e) => steps.map((k) => Number(`${k}e${e}`))).filter((t) => t >= low && t <= high);
  return found.length > 1 ? found : ticks(low, high);
}

// An exponential moving average without the initial bias towards 0.
function smoothed(points, weight) {
  let sum = 0, all = 0;
  return points.map(([x, y]) => { sum = weight * sum + (1 - weight) * y; all = weight * all + (1 - weight); return [x, sum / all]; });
}

// A line has a key, a label, a colour, a dash, and points; optionally whiskers [x, low, high], and a floor where its axis begins.
class Chart {
  constructor(lines, group, { width = 330, height = 170 } = {}) {
    Object.assign(this, { lines, group, width, height, right: width - 8, bottom: height - 28 });
    this.svg = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": lines.map((l) => l.label).join(", ") });
    this.values = lines.map(() => el("span", {}));
    this.buttons = lines.map((line, i) => el("button", { type: "button", title: "Show or hide this line", onclick: () => this.toggle(line) },
      mark(line.colour, line.dash), this.values[i]));
    this.legend = el("div", { class: "legend" }, this.buttons);
    let from = null;
    const at = (event) => {
      const box = this.svg.getBoundingClientRect();
      return this.x.of(((event.clientX - box.left) / box.width) * width);
    };
    this.svg.addEventListener("pointermove", (event) => {
      if (from !== null) this.shade(from, at(event));
      group.point(at(event));
    });
    this.svg.addEventListener("pointerdown", (event) => { if (event.pointerType !== "touch") from = at(event); });
    this.svg.addEventListener("pointerup", (event) => {
      const to = at(event);
      if (from !== null && Math.abs(this.x.at(to) - this.x.at(from)) > width / 50) group.zoom([Math.min(from, to), Math.max(from, to)]);
      from = null;
    });
    this.svg.addEventListener("pointerleave", () => { from = null; group.point(null); });
    this.svg.addEventListener("dblclick", () => group.zoom(null));
    this.draw();
  }

  toggle(line) {
    const { hidden } = this.group;
    if (!hidden.delete(line.key)) hidden.add(line.key);
    this.group.draw();
  }

  draw() {
    const { log, range, smooth, hidden } = this.group, { bottom, right } = this;
    const every = this.lines.flatMap((line) => line.points);
    const logs = [log.x, log.y].map((on, i) => on && every.some((p) => p[i] > 0));
    const fits = (point) => logs.every((on, i) => !on || point[i] > 0);
    this.shown = this.lines.map((line) => (hidden.has(line.key) ? [] : line.points.filter(fits)));
    const smooths = this.lines.map((line) => smooth > 0 && !line.whiskers); // evaluations are few, and each is a mean of many
    this.smooth = this.shown.map((points, i) => (smooths[i] ? smoothed(points, smooth) : points));
    let [x0, x1] = extent(every.filter(fits).map((p) => p[0]));
    if (range) [x0, x1] = [logs[0] ? Math.max(range[0], x0) : range[0], range[1]];
    if (!(x0 < x1)) [x0, x1] = logs[0] ? [x0 / 2, x0 * 2] : [x0 - 0.5, x0 + 0.5];
    this.ends = [x0, x1];
    const [raw, drawn] = [this.shown, this.smooth].map((all) => all.map((points) => this.within(points)));
    const whiskers = this.lines.map((line, i) => (this.shown[i].length ? line.whiskers || [] : []).filter(([x, low]) => x >= x0 && x <= x1 && (!logs[1] || low > 0)));
    const floors = logs[1] ? [] : this.lines.flatMap((line) => line.floor ?? []);
    const inside = [...raw.flat().map((p) => p[1]), ...whiskers.flat().flatMap(([, low, high]) => [low, high]), ...floors];
    let [low, high] = inside.length ? extent(inside) : [0, 1];
    if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) { low -= Math.abs(low) / 10 || 0.5; high += Math.abs(high) / 10 || 0.5; }
    const places = axis(low, high, logs[1], bottom, 12), labels = places.ticks(4).map((t) => [t, number(t)]);
    this.left = margin(labels.map(([, label]) => label));
    this.x = axis(x0, x1, logs[0], this.left, right);
    this.y = places;
    this.cross = svg("line", { class: "cross", y1: 8, y2: bottom, visibility: "hidden" });
    this.band = svg("rect", { y: 8, height: bottom - 8, fill: "rgba(var(--cool), .15)", visibility: "hidden" });
    const whole = this.group.x === "step" && !logs[0];
    this.svg.replaceChildren(
      ...labels.map(([t, label]) => svg("g", {}, svg("line", { class: "axis", x1: this.left, x2: right, y1: places.at(t), y2: places.at(t) }),
        svg("text", { x: this.left - 5, y: places.at(t) + 4, "text-anchor": "end" }, label))),
      ...this.x.ticks(5).filter((t) => !whole || Number.isInteger(t)).map((t) => upright(this.x.at(t), this.height - 10, short(t), this.width)),
      this.band,
      ...this.lines.flatMap((line, i) => [
        smooths[i] ? this.path(line, raw[i], { "stroke-width": 1, opacity: 0.3 }) : [],
        this.path(line, drawn[i], { "stroke-width": 1.6, "stroke-dasharray": line.dash || null }),
        whiskers[i].map(([x, a, b]) => svg("line", { class: "whisker", x1: this.x.at(x), x2: this.x.at(x), y1: places.at(a), y2: places.at(b), stroke: line.colour })),
      ].flat(2)),
      this.cross,
    );
    this.point(null);
  }

  path(line, points, attributes) {
    if (!points.length) return [];
    const dots = (points.length === 1 || line.whiskers ? points : []).map(([x, y]) => svg("circle", { cx: this.x.at(x), cy: this.y.at(y), r: 3, fill: line.colour }));
    const d = points.map(([x, y], i) => `${i ? "L" : "M"}${this.x.at(x).toFixed(1)} ${this.y.at(y).toFixed(1)}`).join("");
    return [...(points.length > 1 ? [svg("path", { d, fill: "none", stroke: line.colour, ...attributes })] : []), ...dots];
  }

  // The part of a line inside the range, cut at its ends.
  within(points) {
    const [x0, x1] = this.ends;
    const between = (a, b, x) => [x, a[1] + ((x - a[0]) / (b[0] - a[0])) * (b[1] - a[1])];
    return points.flatMap((p, i) => [
      ...(i ? [x0, x1].filter((x) => points[i - 1][0] < x && x < p[0]).map((x) => between(points[i - 1], p, x)) : []),
      ...(p[0] >= x0 && p[0] <= x1 ? [p] : []),
    ]);
  }

  shade(from, to) {
    const [a, b] = [this.x.at(from), this.x.at(to)].sort((p, q) => p - q);
    for (const [name, value] of [["x", a], ["width", b - a], ["visibility", "visible"]]) this.band.setAttribute(name, value);
  }

  // Shows the values at a position on the axis in the legend; without a position, the last values.
  point(x) {
    const near = (points) => (x === null ? points.length - 1
      : points.reduce((best, p, i) => (Math.abs(p[0] - x) < Math.abs(points[best][0] - x) ? i : best), 0));
    const found = this.shown.map(near);
    this.lines.forEach((line, i) => {
      const here = this.shown[i][found[i]], mean = here && this.smooth[i] !== this.shown[i] ? ` (${number(this.smooth[i][found[i]][1])})` : "";
      this.values[i].textContent = visible(here ? `${line.label} ${number(here[1])}${mean}${x === null ? "" : ` at ${place(here[0])}`}` : line.label);
      this.buttons[i].setAttribute("aria-pressed", String(!this.group.hidden.has(line.key)));
    });
    const first = this.shown.findIndex((points) => points.length);
    const at = x === null || first < 0 ? null : this.x.at(this.shown[first][found[first]][0]);
    this.cross.setAttribute("visibility", at === null || at < this.left - 0.01 || at > this.right + 0.01 ? "hidden" : "visible");
    if (at !== null) { this.cross.setAttribute("x1", at); this.cross.setAttribute("x2", at); }
  }
}
