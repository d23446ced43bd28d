// Curves over steps, sampled tokens or seconds. All of them share the axis, one crosshair and one zoom.

const curves = {
  x: null, // what they are drawn over; null: as the report was written
  range: null, // [first, last] on that axis; null: all
  charts: [],

  view() {
    this.x ??= data.x;
    const groups = this.groups();
    if (!groups.length && !this.measured("step")) return [el("p", { class: "muted" }, "No step has been logged yet.")];
    this.charts = [];
    return [
      el("p", { class: "bar hints" }, "Hover to see values. Drag to zoom all curves to a range. ",
        el("button", { type: "button", id: "unzoom", onclick: () => this.zoom(null) }, "Show all"),
        el("label", {}, "Over", el("select", { id: "axis", onchange: (event) => this.over(event.target.value) },
          Object.entries(data.axes).map(([axis, label]) => el("option", { value: axis, selected: axis === this.x, disabled: !this.measured(axis) }, label))))),
      !groups.length && el("p", { class: "muted" }, "These runs have not recorded what the curves are to be drawn over. Choose another axis."),
      el("div", { class: "grid" }, groups.map(({ title, note, lines }) => {
        const chart = new Chart(lines);
        this.charts.push(chart);
        return card(title, note, chart.svg, chart.legend);
      })),
    ].filter(Boolean);
  },

  measured(axis) { return data.runs.some((run) => run.x[axis]?.length); },
  over(axis) { this.x = axis; this.range = null; open("curves"); },

  zoom(range) { this.range = range; for (const chart of this.charts) chart.draw(); },
  point(x) { for (const chart of this.charts) chart.point(x); },

  // The charts in order, each with its title and its metrics. Charts without data are left out.
  groups() {
    const one = (name) => (key) => key === name;
    const like = (pattern) => (key) => pattern.test(key);
    const wanted = [
      ["Reward", one("reward/mean"), "mean over the step's responses"],
      ["Accuracy in training", like(/^reward\/accuracy$/)],
      ["Accuracy by difficulty", like(/^reward\/accuracy\//), "in training"],
      ["Held-out accuracy", like(/^eval\/[^/]+\/(avg@\d+|maj@\d+|greedy)$/)],
      ["Held-out accuracy by difficulty", like(/^eval\/[^/]+\/avg@\d+\/./)],
      ["Success of first and second attempts", like(/^(first|second)\/success$/), "second attempts: of those who retried"],
      ["Reflections", like(/^reflection\/(readable|shown)$/), "shares that could be read, and were shown"],
      ["Transfer", like(/^transfer\/(mean|after_right|after_wrong)$/), "share of prefixes that the receiver continued to a right answer"],
      ["Transfer by cut", like(/^transfer\/cut\//), "by the largest share of the reasoning that the receiver saw"],
      ["Entropy", one("rollout/entropy"), "mean over tokens, in nats"],
      ["Response length", one("rollout/length"), "tokens"],
      ["Sampled tokens", like(/^tokens\/(?!total$)/), "per step, by all models and by each other than the policy"],
      ["KL to the reference", one("optim/kl")],
      ["Drift in the update", one("optim/drift"), "KL to the policy that sampled the responses"],
      ["Gradient norm", one("optim/grad_norm"), "before clipping"],
      ["Gradient share by probability", like(/^reg\/pull_p/), "share of Σ w·|A|·(1 − p), the pull at the sampled tokens' logits"],
      ["Weight by probability", like(/^reg\/.+\/weight_p/), "mean policy weight in each interval of p"],
      ["Clipped tokens", like(/^optim\/clip_/)],
      ["Tokens flagged, scored or set to zero", like(/^reg\/.+\/(flagged|scored|zero)_share$/)],
      ["Time per step", like(/^time\/(step|rollout|transfer|update|regulate|record|score)$/), "seconds"],
    ];
    return wanted.map(([title, matches, note]) => ({ title, note, lines: this.lines(matches) })).filter((g) => g.lines.length);
  },

  lines(matches) {
    const keys = [...new Set(data.runs.flatMap((run) => Object.keys(run.metrics)))].filter(matches);
    const several = data.runs.length > 1;
    const tail = (key) => key.replace(/^(reg\/all|reg|reward|eval|optim|rollout|time|tokens|transfer)\//, "");
    return data.runs.flatMap((run, r) => keys.map((key, k) => ({
      label: [several && run.name, (keys.length > 1 || !several) && tail(key)].filter(Boolean).join(" · "),
      colour: colour(several ? r : k),
      dash: DASHES[several ? k % DASHES.length : 0],
      points: (run.x[this.x] || []).map((x, i) => [x, (run.metrics[key] || [])[i]]).filter((point) => point.every(Number.isFinite)),
    })).filter((line) => line.points.length));
  },
};

class Chart {
  constructor(lines) {
    this.lines = lines;
    this.svg = svg("svg", { viewBox: "0 0 330 170", role: "img", "aria-label": lines.map((l) => l.label).join(", ") });
    this.legend = el("div", { class: "legend" });
    let from = null;
    const at = (event) => {
      const box = this.svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * 330;
      return this.x0 + ((x - 40) / 282) * (this.x1 - this.x0);
    };
    this.svg.addEventListener("pointermove", (event) => {
      if (from !== null) this.shade(from, at(event));
      curves.point(at(event));
    });
    this.svg.addEventListener("pointerdown", (event) => { if (event.pointerType !== "touch") from = at(event); });
    this.svg.addEventListener("pointerup", (event) => {
      const to = at(event);
      if (from !== null && Math.abs(to - from) > (this.x1 - this.x0) / 40) curves.zoom([Math.min(from, to), Math.max(from, to)]);
      from = null;
    });
    this.svg.addEventListener("pointerleave", () => { from = null; curves.point(null); });
    this.svg.addEventListener("dblclick", () => curves.zoom(null));
    this.draw();
  }

  draw() {
    const all = this.lines.flatMap((line) => line.points);
    [this.x0, this.x1] = curves.range || extent(all.map((p) => p[0]));
    if (this.x0 === this.x1) { this.x0 -= 0.5; this.x1 += 0.5; }
    const parts = this.lines.map((line) => this.within(line.points));
    const inside = parts.flat().map((p) => p[1]);
    let [low, high] = inside.length ? extent(inside) : [0, 1];
    if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) { low -= Math.abs(low) / 10 || 0.5; high += Math.abs(high) / 10 || 0.5; }
    this.x = (x) => 40 + ((x - this.x0) / (this.x1 - this.x0)) * 282;
    this.y = (value) => 142 - ((value - low) / (high - low)) * 130;
    this.cross = svg("line", { class: "cross", y1: 8, y2: 142, visibility: "hidden" });
    this.band = svg("rect", { y: 8, height: 134, fill: "rgba(var(--cool), .15)", visibility: "hidden" });
    this.svg.replaceChildren(
      ...ticks(low, high).map((t) => svg("g", {}, svg("line", { class: "axis", x1: 40, x2: 322, y1: this.y(t), y2: this.y(t) }),
        svg("text", { x: 35, y: this.y(t) + 4, "text-anchor": "end" }, number(t)))),
      ...ticks(this.x0, this.x1, 5).filter((t) => curves.x !== "step" || Number.isInteger(t)).map((t) => svg("text", { x: this.x(t), y: 160, "text-anchor": "middle" }, short(t))),
      this.band,
      ...this.lines.flatMap((line, i) => {
        const shown = parts[i];
        if (shown.length === 1) return svg("circle", { cx: this.x(shown[0][0]), cy: this.y(shown[0][1]), r: 3, fill: line.colour });
        const d = shown.map(([x, y], i) => `${i ? "L" : "M"}${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`).join("");
        return shown.length ? svg("path", { d, fill: "none", stroke: line.colour, "stroke-width": 1.6, "stroke-dasharray": line.dash || null }) : [];
      }),
      this.cross,
    );
    this.point(null);
  }

  // The part of a line inside the range, cut at its ends.
  within(points) {
    const between = (a, b, x) => [x, a[1] + ((x - a[0]) / (b[0] - a[0])) * (b[1] - a[1])];
    return points.flatMap((p, i) => [
      ...(i ? [this.x0, this.x1].filter((x) => points[i - 1][0] < x && x < p[0]).map((x) => between(points[i - 1], p, x)) : []),
      ...(p[0] >= this.x0 && p[0] <= this.x1 ? [p] : []),
    ]);
  }

  shade(from, to) {
    const [a, b] = [this.x(from), this.x(to)].sort((p, q) => p - q);
    for (const [name, value] of [["x", a], ["width", b - a], ["visibility", "visible"]]) this.band.setAttribute(name, value);
  }

  // Shows the values at a place on the axis in the legend; without one, the last values.
  point(x) {
    const nearest = (points) => (x === null ? points[points.length - 1]
      : points.reduce((best, p) => (Math.abs(p[0] - x) < Math.abs(best[0] - x) ? p : best)));
    const found = this.lines.map((line) => nearest(line.points));
    this.legend.replaceChildren(...this.lines.map((line, i) => el("span", {},
      el("i", { style: { background: line.colour } }), `${line.label} ${number(found[i][1])}${x === null ? "" : ` at ${place(found[i][0])}`}`)));
    const at = x === null ? null : this.x(found[0][0]);
    this.cross.setAttribute("visibility", at === null || at < 40 || at > 322 ? "hidden" : "visible");
    if (at !== null) { this.cross.setAttribute("x1", at); this.cross.setAttribute("x2", at); }
  }
}
