// The first page: held-out accuracy before and after training, its curve, and the model, task and length of training.

const fixed = (value) => (Number.isFinite(value) ? value.toFixed(3) : "–");
const interval = (row) => `[${fixed(row.low)}, ${fixed(row.high)}]`;
const signed = (value) => `${value < 0 ? "−" : "+"}${fixed(Math.abs(value))}`;
const spelt = (row) => (row ? `${fixed(row.value)} ${interval(row)}` : "–");
const many = (value) => (Number.isFinite(value) ? value.toLocaleString("en", { maximumFractionDigits: 0 }) : "–");
const sumOf = (run, key) => (run.metrics[key] || []).reduce((sum, value) => sum + (value || 0), 0);
const field = (run, path) => path.split(".").reduce((value, key) => (value && typeof value === "object" ? value[key] : undefined), run.config);
const spoken = (value) => (value === undefined || value === null ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));
const both = (run) => [run.before, run.after];

function duration(seconds) {
  const [h, m, s] = [Math.floor(seconds / 3600), Math.floor((seconds % 3600) / 60), Math.round(seconds % 60)];
  return seconds < 60 ? `${number(seconds)} s` : h ? `${h} h ${m} min` : `${m} min ${s} s`;
}

// A measure of held-out accuracy before, during and after training, with the known intervals.
function heldOut(run, measure, axis) {
  if (!run.x[axis]?.length) return { points: [], whiskers: [] };
  const key = Object.keys(run.metrics).find((each) => each.startsWith("eval/") && each.endsWith(`/${measure.replace(", difficulty ", "/")}`));
  const end = run.x[axis].at(Math.max(-1, run.steps.lastIndexOf(run.done)));
  const [first, last] = both(run).map((found, i) => (found?.table[measure] ? [[i ? end : 0, found.table[measure]]] : []));
  const point = ([x, row]) => [x, row.value];
  const course = (key ? points(run, key, axis) : []).filter(([x]) => !last.length || x !== end);
  return {
    points: [...first.map(point), ...course, ...last.map(point)].sort((a, b) => a[0] - b[0]),
    whiskers: [...first, ...last].map(([x, row]) => [x, row.low, row.high]),
  };
}

const result = Object.assign(new Group(), {
  x: "step",

  view() {
    this.charts = [];
    const measures = [...new Set(data.runs.flatMap((run) => both(run).flatMap((found) => Object.keys(found?.table || {}))))];
    const [parts, whole] = [true, false].map((part) => measures.filter((name) => name.includes(", difficulty ") === part));
    const chart = this.curve(whole);
    return [
      this.headline(whole),
      this.learned(),
      (measures.length > 0 || chart) && el("div", { class: data.runs.length > 1 ? "result several" : "result" },
        measures.length > 0 && card("Held-out accuracy", "Brackets show 95 % intervals over problems. Both evaluations use the same problems, so the change has a paired interval.", this.table(whole), parts.length > 0 && el("details", {}, el("summary", {}, "By difficulty"), this.table(parts)),
          this.conditions(), el("p", { class: "bar" }, el("button", { type: "button", id: "csv", onclick: () => saveTable("result.csv", this.rows(measures)) }, "Save as CSV"))),
        chart && card("Accuracy over steps", "Bars are the intervals before and after training.", chart.svg, chart.legend)),
      el("h2", {}, "What was trained"), el("div", { class: "facts" }, table(["", ...data.runs.map((run) => run.name)], this.facts())),
    ].flat().filter(Boolean);
  },

  headline(measures) {
    if (!measures.length) return el("p", { class: "muted" }, "No held-out accuracy has been measured. Training accuracy and reward are under curves.");
    if (data.runs.length > 1) return null;
    const [run] = data.runs, n = (run.after || run.before).n;
    const ends = (measure) => both(run).map((found) => (found ? fixed(found.table[measure]?.value) : "…")).join(" → ");
    const state = run.after ? "" : `, at step ${many(run.steps.at(-1) ?? 0)} of ${spoken(field(run, "steps"))}`;
    return el("p", { class: "headline" }, el("b", {}, ends(measures[0])), ` ${measures[0]} on ${many(n)} held-out problems${state}`,
      measures.slice(1).includes("greedy") && el("span", { class: "muted" }, ` · greedy ${ends("greedy")}`));
  },

  // Which measures rose, fell, or did neither, for a few runs.
  learned() {
    const several = data.runs.length > 1;
    const lines = data.runs.flatMap((run) => run.learned.map((line) => el("li", {}, several && `${run.name}: `, line)));
    return data.runs.length <= 3 && lines.length > 0 && el("ul", { class: "verdict" }, lines);
  },

  table(measures) {
    const several = data.runs.length > 1;
    const rows = measures.flatMap((measure) => data.runs.map((run, r) => {
      const [before, after] = both(run).map((found) => found?.table[measure]);
      const known = before && after, within = run.changes[measure];
      const change = known ? after.value - before.value : null;
      const cell = (row) => (row ? [fixed(row.value), " ", el("small", {}, interval(row))] : "–");
      return [...(several ? [el("span", { class: "legend" }, el("span", {}, mark(colour(r)), run.name))] : []), r ? "" : measure, cell(before), cell(after),
        known ? [signed(change), " ", within && el("small", {}, `[${within.map(signed).join(", ")}]`)] : "–", this.picture(before, after, colour(several ? r : 0))];
    }));
    const order = (cells) => (several ? [cells[1], cells[0], ...cells.slice(2)] : cells);
    return table(order([...(several ? ["run"] : []), "measure", "before", "after", "change", "from 0 to 1"]), rows.map(order));
  },

  // Before (hollow) and after (filled), each with its interval, between 0 and 1.
  picture(before, after, shade) {
    const x = (value) => 4 + 112 * Math.min(1, Math.max(0, value));
    const draw = (row, y, ink, fill) => row && [svg("line", { x1: x(row.low), x2: x(row.high), y1: y, y2: y, stroke: ink, "stroke-width": 2 }),
      svg("circle", { cx: x(row.value), cy: y, r: 3, stroke: ink, "stroke-width": 1.4, fill })];
    return svg("svg", { class: "range", viewBox: "0 0 120 20", role: "img", "aria-label": `${spelt(before)} → ${spelt(after)}` },
      svg("line", { class: "axis", x1: 4, x2: 116, y1: 10, y2: 10 }), [0, 0.5, 1].map((t) => svg("line", { class: "axis", x1: x(t), x2: x(t), y1: 6, y2: 14 })),
      draw(before, 6, "var(--muted)", "var(--card)"), draw(after, 14, shade, shade));
  },

  // How the accuracy was measured, for every run that differs from the runs before it.
  conditions() {
    const said = data.runs.map((run) => {
      const found = run.after || run.before;
      if (!found) return null;
      const share = (key) => both(run).filter(Boolean).map((each) => percent(Number.isFinite(each[key]) ? each[key] / (each.n * each.samples) : null)).join(" → ");
      const lost = (samples) => `${share("cut_off")} of the ${samples} were cut off, ${share("unreadable")} unreadable.`;
      if (found.temperature === 0) return `${many(found.n)} problems, one greedy answer each; ${lost("answers")}`;
      return `${many(found.n)} problems × ${found.samples} samples at temperature ${number(found.temperature)}, and one greedy answer each; ${lost("samples")}`;
    });
    const measured = data.runs.filter((run) => run.after);
    const differ = (of) => new Set(measured.map(of)).size > 1;
    const settings = (run) => JSON.stringify([field(run, "task"), field(run, "evaluation.seed"), run.after.n]); // older runs have no fingerprint
    const unlike = [
      differ(measured.every((run) => run.after.problems) ? (run) => run.after.problems : settings) && "These runs were measured on different held-out problems.",
      differ((run) => run.done) && `These runs were measured after different numbers of steps: ${measured.map((run) => `${run.name} ${many(run.done)}`).join(", ")}.`,
    ].filter(Boolean);
    return [...unlike.map((sentence) => el("p", { class: "unlike" }, sentence)), ...data.runs.flatMap((run, r) => (said[r] && said.indexOf(said[r]) === r ? el("p", {}, new Set(said).size > 1 && `${run.name}: `, said[r]) : []))];
  },

  // The curves of avg@k, greedy and pass@k, and of training accuracy (null).
  curve(measures) {
    const several = data.runs.length > 1, crowded = data.runs.length > 3; // then there is room for only one line per run
    const shown = crowded && measures.length ? measures.slice(0, 1) : [...measures.filter((name) => !name.startsWith("maj@")), null];
    const lines = data.runs.flatMap((run, r) => shown.map((measure, k) => ({
      key: `${r} ${measure}`, colour: colour(several ? r : k), dash: measure === null ? "2 3" : several ? DASHES[[0, 1, 3, 4, 5][k % 5]] : "",
      label: [several && run.name, measure ?? "accuracy in training"].filter(Boolean).join(" · "),
      ...(measure === null ? { points: points(run, "reward/accuracy", this.x) } : heldOut(run, measure, this.x)),
    }))).filter((line) => line.points.length);
    return lines.length > 0 && this.chart(lines, { width: 560, height: 250 });
  },

  // [name, value of each run], without rows that no run has.
  facts() {
    const where = (run, ...keys) => keys.map((key) => run.environment?.[key]).filter((value) => value !== undefined);
    const task = (run) => {
      const { name, ...others } = Object(field(run, "task"));
      return name && [name, ...Object.entries(others).map(([key, value]) => `${key} ${spoken(value)}`)].join(", ");
    };
    const samples = (run) => {
      const [prompts, group] = [field(run, "prompts"), field(run, "group")];
      return prompts && group && run.steps.length > 0 && `${many(run.steps.length * prompts * group)} (${many(prompts)} problems × ${many(group)} per step)`;
    };
    const rows = [
      ["model", (run) => field(run, "model"), (run) => where(run, "parameters").map((n) => `${large(n)} parameters`)],
      ["task", task],
      ["regulator", (run) => field(run, "regulator")],
      ["algorithm", (run) => field(run, "algorithm")],
      ["surrogate", (run) => field(run, "objective.surrogate")],
      ["learning rate", (run) => field(run, "optim.lr")],
      ["seed", (run) => field(run, "seed")],
      ["steps", (run) => (run.steps.length ? `${many(run.steps.at(-1))} of ${spoken(field(run, "steps"))}` : undefined)],
      ["responses", samples],
      ["sampled tokens", (run) => run.metrics["tokens/total"]?.findLast(Number.isFinite)?.toLocaleString("en")],
      ["time", (run) => (run.metrics["time/step"] ? `${duration(sumOf(run, "time/step"))} without evaluations` : undefined)],
      ["machine", (run) => where(run, "device").map((device) => [device, ...where(run, "threads").map((n) => `${n} threads`), ...where(run, "system")].join(", "))],
      ["versions", (run) => ["poise", "torch"].flatMap((name) => where(run, name).map((version) => `${name} ${version}`)).join(", ")],
    ];
    return rows.map(([name, ...of]) => [name, ...data.runs.map((run) => of.flatMap((each) => each(run) ?? []).filter((value) => value !== false && value !== "").map(spoken).join(", ") || "–")])
      .filter(([, ...values]) => values.some((value) => value !== "–"));
  },

  rows(measures) {
    const row = (run, measure, when) => [run.name, measure, when, ...["value", "low", "high"].map((key) => run[when]?.table[measure]?.[key])];
    return [["run", "measure", "when", "value", "low", "high"], ...data.runs.flatMap((run) => measures.flatMap((measure) => ["before", "after"].map((when) => row(run, measure, when))))];
  },
});
