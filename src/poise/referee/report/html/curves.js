// Curves over steps, sampled tokens or seconds. All curves share the axis, the crosshair and the zoom.

const curves = Object.assign(new Group(), {
  x: null, // the x axis; null: the default of the report
  find: "", every: false, // the searched metric name, and whether to show all metrics

  view() {
    this.x ??= data.x;
    if (!this.groups().length && !this.measured("step")) return [el("p", { class: "muted" }, "No step has been logged yet.")];
    this.grid = el("div", { class: "grid" });
    this.fill();
    const check = (id, label, on, change) => el("label", { class: "check" }, el("input", { type: "checkbox", id, checked: on, onchange: (event) => change(event.target.checked) }), label);
    return [
      el("div", { class: "bar" },
        el("label", {}, "Over", el("select", { id: "axis", onchange: (event) => this.over(event.target.value) },
          Object.entries(data.axes).map(([axis, label]) => el("option", { value: axis, selected: axis === this.x, disabled: !this.measured(axis) }, label)))),
        el("label", {}, "Smoothing", el("input", { type: "range", id: "smooth", min: 0, max: 0.99, step: 0.01, value: this.smooth,
          oninput: (event) => { this.smooth = Number(event.target.value); this.draw(); } })),
        check("log-x", "log x", this.log.x, (on) => { this.log.x = on; this.draw(); }),
        check("log-y", "log y", this.log.y, (on) => { this.log.y = on; this.draw(); }),
        el("label", {}, "Metrics", el("input", { type: "search", id: "find", value: this.find, placeholder: "time, grad_norm, …",
          oninput: (event) => { this.find = event.target.value; this.fill(); } })),
        check("every", "every metric", this.every, (on) => { this.every = on; this.fill(); }),
        el("button", { type: "button", id: "unzoom", onclick: () => this.zoom(null) }, "Show all"),
        el("button", { type: "button", id: "csv", onclick: () => saveTable("metrics.csv", this.rows()) }, "Save as CSV")),
      el("p", { class: "hints" }, "Hover to see values, drag to zoom all curves to a range, click on a name in a legend to hide its line."),
      this.grid,
    ];
  },

  // Draws the requested charts.
  fill() {
    this.charts = [];
    const groups = this.groups();
    const none = this.find ? "No metric has this in its name." : "These runs have no data for this axis. Choose another one.";
    this.grid.replaceChildren(...groups.map(({ title, note, lines }) => {
      const chart = this.chart(lines);
      return card(title, note, chart.svg, chart.legend);
    }), ...(groups.length ? [] : [el("p", { class: "muted" }, none)]));
  },

  measured(axis) { return data.runs.some((run) => run.x[axis]?.length); },
  over(axis) { this.x = axis; this.range = null; open("curves"); },

  // All metrics of all runs, one row per step.
  rows() {
    const keys = [...new Set(data.runs.flatMap((run) => Object.keys(run.metrics)))].sort();
    return [["run", "step", ...keys], ...data.runs.flatMap((run) => run.steps.map((step, i) => [run.name, step, ...keys.map((key) => run.metrics[key]?.[i])]))];
  },

  // The charts in order, each with its title and its metrics. Charts without data are omitted.
  groups() {
    const one = (name) => (key) => key === name;
    const like = (pattern) => (key) => pattern.test(key);
    const all = [...new Set(data.runs.flatMap((run) => Object.keys(run.metrics)))];
    const several = (pattern) => (key) => pattern.test(key) && all.filter(like(pattern)).length > 1; // a single difficulty would repeat the overall curve
    const wanted = [
      ["Reward", one("reward/mean"), "mean over the step's responses"],
      ["Accuracy in training", like(/^reward\/accuracy$/)],
      ["Accuracy by difficulty", several(/^reward\/accuracy\//), "in training"],
      ["Held-out accuracy", like(/^eval\/.+\/((avg|pass|maj)@\d+|greedy)$/)],
      ["Held-out accuracy by difficulty", several(/^eval\/.+\/avg@\d+\/./)],
      ["Success of first and second attempts", like(/^(first|second)\/success$/), "second attempts: of those who retried"],
      ["Reflections", like(/^reflection\/(readable|shown)$/), "shares that could be read, and were shown"],
      ["Transfer", like(/^transfer\/(mean|after_right|after_wrong)$/), "share of prefixes that the receiver continued to a right answer"],
      ["Transfer by cut", like(/^transfer\/cut\//), "by the largest share of the reasoning that the receiver saw"],
      ["Entropy", one("rollout/entropy"), "mean over tokens, in nats"],
      ["Response length", one("rollout/length"), "tokens"],
      ["Sampled tokens", like(/^tokens\/(?!total$)/), "per step: of all models, and of each but the policy"],
      ["KL to the reference", one("optim/kl")],
      ["Drift in the update", one("optim/drift"), "KL to the policy that sampled the responses"],
      ["Gradient norm", one("optim/grad_norm"), "before clipping"],
      ["Gradient share by probability", like(/^reg\/pull_p/), "share of Σ w·|A|·(1 − p), the pull at the sampled tokens' logits"],
      ["Weight by probability", like(/^reg\/.+\/weight_p/), "mean policy weight in each interval of p", 0],
      ["Clipped tokens", like(/^optim\/clip_/)],
      ["Tokens flagged, scored or set to zero", like(/^reg\/.+\/(flagged|scored|zero)_share$/)],
      ["Time per step", like(/^time\/(step|rollout|transfer|update|regulate|record|score)$/), "seconds"],
    ];
    const named = (text) => text.toLowerCase().includes(this.find.trim().toLowerCase());
    const asked = ([title, matches]) => named(title) || all.some((key) => matches(key) && named(key));
    const others = this.every || this.find.trim() ? all.filter((key) => named(key) && !wanted.some(([, matches]) => matches(key))).sort().map((key) => [key, one(key)]) : [];
    return [...wanted.filter(asked), ...others].map(([title, matches, note, floor]) => ({ title, note, lines: this.lines(all.filter(matches), floor) })).filter((g) => g.lines.length);
  },

  lines(keys, floor) {
    const several = data.runs.length > 1;
    const tail = (key) => key.replace(/^(reg\/all|reg|reward|eval|optim|rollout|time|tokens|transfer)\//, "");
    return data.runs.flatMap((run, r) => keys.map((key, k) => ({
      key: `${r} ${key}`, floor,
      label: [several && run.name, (keys.length > 1 || !several) && tail(key)].filter(Boolean).join(" · "),
      colour: colour(several ? r : k),
      dash: DASHES[several ? k % DASHES.length : 0],
      ...(key.startsWith("eval/") ? heldOut(run, key.replace(/^eval\/.+?\/(?=(avg|pass|maj)@|greedy)/, "").replace("/", ", difficulty "), this.x) : { points: points(run, key, this.x) }),
    })).filter((line) => line.points.length));
  },
});

// The points of a metric's curve. A divergence that is only rounding, such as 2e-13, is drawn as 0.
const plain = (key, value) => (/^optim\/(drift|kl)$/.test(key) && Math.abs(value) < 1e-9 ? 0 : value);
const points = (run, key, axis) => (run.x[axis] || []).map((x, i) => [x, plain(key, (run.metrics[key] || [])[i])]).filter((point) => point.every(Number.isFinite));

