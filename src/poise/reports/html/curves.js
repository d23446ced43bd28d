// Curves over the steps. All of them share one crosshair and one zoom.

const curves = {
  range: null, // [first, last] step; null: all steps
  charts: [],

  view() {
    const groups = this.groups();
    if (!groups.length) return [el("p", { class: "muted" }, "No step has been logged yet.")];
    this.charts = [];
    return [
      el("p", { class: "bar hints" }, "Hover to see values. Drag to zoom all curves to a range of steps. ",
        el("button", { type: "button", id: "unzoom", onclick: () => this.zoom(null) }, "All steps")),
      el("div", { class: "grid" }, groups.map(({ title, note, lines }) => {
        const chart = new Chart(lines);
        this.charts.push(chart);
        return card(title, note, chart.svg, chart.legend);
      })),
    ];
  },

  zoom(range) { this.range = range; for (const chart of this.charts) chart.draw(); },
  point(step) { for (const chart of this.charts) chart.point(step); },

  // The charts in order, each with its title and its metrics. Charts without data are left out.
  groups() {
    const one = (name) => (key) => key === name;
    const like = (pattern) => (key) => pattern.test(key);
    const wanted = [
      ["Reward", one("reward/mean"), "mean over the step's responses"],
      ["Accuracy in training", like(/^reward\/accuracy$/)],
      ["Accuracy by difficulty", like(/^reward\/accuracy\//), "in training"],
      ["Held-out accuracy", like(/^eval\/[^/]+\/(avg@\d+|greedy)$/)],
      ["Held-out accuracy by difficulty", like(/^eval\/[^/]+\/avg@\d+\/./)],
      ["Entropy", one("rollout/entropy"), "mean over tokens, in nats"],
      ["Response length", one("rollout/length"), "tokens"],
      ["KL to the reference", one("optim/kl")],
      ["Drift in the update", one("optim/drift"), "KL to the policy that sampled the responses"],
      ["Gradient norm", one("optim/grad_norm"), "before clipping"],
      ["Gradient share by probability", like(/^reg\/pull_p/), "share of Σ w·|A|·(1 − p), the pull at the sampled tokens' logits"],
      ["Weight by probability", like(/^reg\/.+\/weight_p/), "mean policy weight in each interval of p"],
      ["Clipped tokens", like(/^optim\/clip_/)],
      ["Tokens flagged, scored or set to zero", like(/^reg\/.+\/(flagged|scored|zero)_share$/)],
      ["Time per step", like(/^time\/(step|rollout|update|regulate|record|score)$/), "seconds"],
    ];
    return wanted.map(([title, matches, note]) => ({ title, note, lines: this.lines(matches) })).filter((g) => g.lines.length);
  },

  lines(matches) {
    const keys = [...new Set(data.runs.flatMap((run) => Object.keys(run.metrics)))].filter(matches);
    const several = data.runs.length > 1;
    const tail = (key) => key.replace(/^(reg\/all|reg|reward|eval|optim|rollout|time)\//, "");
    return data.runs.flatMap((run, r) => keys.map((key, k) => ({
      label: [several && run.name, (keys.length > 1 || !several) && tail(key)].filter(Boolean).join(" · "),
      colour: colour(several ? r : k),
      dash: DASHES[several ? k % DASHES.length : 0],
      points: run.steps.map((step, i) => [step, (run.metrics[key] || [])[i]]).filter(([, y]) => y !== null && y !== undefined),
    })).filter((line) => line.points.length));
  },
};

class Chart {
  constructor(lines) {
    this.lines = lines;
    this.svg = svg("svg", { viewBox: "0 0 330 170", role: "img", "aria-label": lines.map((l) => l.label).join(", ") });
    this.legend = el("div", { class: "legend" });
    let from = null;
    const step = (event) => {
      const box = this.svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * 330;
      return this.x0 + ((x - 40) / 282) * (this.x1 - this.x0);
    };
    this.svg.addEventListener("pointermove", (event) => {
      if (from !== null) this.shade(from, step(event));
      curves.point(step(event));
    });
    this.svg.addEventListener("pointerdown", (event) => { if (event.pointerType !== "touch") from = step(event); });
    this.svg.addEventListener("pointerup", (event) => {
      const to = step(event);
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
    const inside = all.filter(([x]) => x >= this.x0 && x <= this.x1).map((p) => p[1]);
    let [low, high] = inside.length ? extent(inside) : [0, 1];
    if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) { low -= Math.abs(low) / 10 || 0.5; high += Math.abs(high) / 10 || 0.5; }
    this.x = (step) => 40 + ((step - this.x0) / (this.x1 - this.x0)) * 282;
    this.y = (value) => 142 - ((value - low) / (high - low)) * 130;
    this.cross = svg("line", { class: "cross", y1: 8, y2: 142, visibility: "hidden" });
    this.band = svg("rect", { y: 8, height: 134, fill: "rgba(var(--cool), .15)", visibility: "hidden" });
    this.svg.replaceChildren(
      ...ticks(low, high).map((t) => svg("g", {}, svg("line", { class: "axis", x1: 40, x2: 322, y1: this.y(t), y2: this.y(t) }),
        svg("text", { x: 35, y: this.y(t) + 4, "text-anchor": "end" }, number(t)))),
      ...ticks(this.x0, this.x1, 5).filter(Number.isInteger).map((t) => svg("text", { x: this.x(t), y: 160, "text-anchor": "middle" }, t)),
      this.band,
      ...this.lines.flatMap((line) => {
        const shown = line.points.filter(([x]) => x >= this.x0 - 1 && x <= this.x1 + 1);
        if (shown.length === 1) return svg("circle", { cx: this.x(shown[0][0]), cy: this.y(shown[0][1]), r: 3, fill: line.colour });
        const d = shown.map(([x, y], i) => `${i ? "L" : "M"}${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`).join("");
        return shown.length ? svg("path", { d, fill: "none", stroke: line.colour, "stroke-width": 1.6, "stroke-dasharray": line.dash || null }) : [];
      }),
      this.cross,
    );
    this.point(null);
  }

  shade(from, to) {
    const [a, b] = [this.x(from), this.x(to)].sort((p, q) => p - q);
    for (const [name, value] of [["x", a], ["width", b - a], ["visibility", "visible"]]) this.band.setAttribute(name, value);
  }

  // Shows the values at a step in the legend; without a step, the last values.
  point(step) {
    const nearest = (points) => (step === null ? points[points.length - 1]
      : points.reduce((best, p) => (Math.abs(p[0] - step) < Math.abs(best[0] - step) ? p : best)));
    const found = this.lines.map((line) => nearest(line.points));
    this.legend.replaceChildren(...this.lines.map((line, i) => el("span", {},
      el("i", { style: { background: line.colour } }), `${line.label} ${number(found[i][1])}${step === null ? "" : ` at ${found[i][0]}`}`)));
    const at = step === null ? null : this.x(found[0][0]);
    this.cross.setAttribute("visibility", at === null || at < 40 || at > 322 ? "hidden" : "visible");
    if (at !== null) { this.cross.setAttribute("x1", at); this.cross.setAttribute("x2", at); }
  }
}
