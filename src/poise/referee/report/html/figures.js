// The figures of `poise diagnose`.

const figures = {
  chosen: {}, // run -> the regulator whose matrices are shown

  view() {
    return data.runs.filter((run) => run.diagnose).map((run) => this.run(run));
  },

  run(run) {
    const diagnosis = run.diagnose, { mean, error, intervals } = diagnosis;
    const methods = Object.keys(mean.regulators);
    const first = mean.regulators[methods[0]], firstError = error.regulators[methods[0]];
    const inside = (values, errors) => ({ values, errors: errors || [] });
    const last = intervals.length - 1;
    const own = intervals.map((_, i) => first.influence[i].moved[i]);
    const alone = (i) => bars(intervals, [
      { label: `after a step with ${intervals[i]} alone`, ...inside(first.influence[i].moved, firstError.influence[i].moved) },
      { label: "after a step with their own tokens", values: own, errors: [] }]);
    const pick = el("select", { "aria-label": "Regulator", onchange: () => { this.chosen[run.name] = pick.value; show(); } },
      methods.map((name) => el("option", { value: name, selected: (this.chosen[run.name] || methods[0]) === name }, name)));
    const matrices = el("div", { class: "grid" });
    const show = () => {
      const pulls = mean.regulators[pick.value];
      matrices.replaceChildren(
        card("Cross-influence", "Mean of |Δp|. Rows: an update on only one interval; last row: the method's whole update. Columns: the tokens that move.",
          heat([...intervals, "update"], intervals, pulls.influence.map((row) => row.moved))),
        card("Cosine", "Between the gradients of two intervals.", heat(intervals, intervals, pulls.cosine, 1)),
        card("Direction", "Mean of Δp after the method's whole update, for tokens with positive and with negative advantage.",
          bars(intervals, [{ label: "A > 0", values: pulls.influence.at(-1).rewarded, errors: [] },
            { label: "A < 0", values: pulls.influence.at(-1).punished, errors: [] }])),
      );
    };
    show();
    return el("article", {},
      el("h2", {}, `${run.name}: which tokens drive an update`),
      el("ul", { class: "verdict" }, diagnosis.verdict.map((sentence) => el("li", {}, sentence))),
      el("p", { class: "muted" }, `${diagnosis.settings.batches} batches of ${number(mean.count)} tokens on average. Bars are means, whiskers are standard errors. `
        + `${percent(mean.with_gradient)} of the tokens have an advantage. Columns are intervals of the probability p of the sampled token.`),
      el("div", { class: "grid" },
        card("(a) Share of the tokens", "In each interval.", bars(intervals, [{ label: "share", ...inside(mean.token_share, error.token_share) }], { unit: percent })),
        card("(a) Density", "Distribution of the tokens over p, on a logarithmic scale.", density(mean.density)),
        card("(b) Advantages", "Share of the interval's tokens with A > 0 and with A < 0.", bars(intervals, [
          { label: "A > 0", ...inside(mean.advantage.positive, error.advantage.positive) },
          { label: "A < 0", ...inside(mean.advantage.negative, error.advantage.negative) }], { unit: percent })),
        card("(c) Movement by a step", `Mean of |Δp| after one ${methods[0]} update on all tokens.`,
          bars(intervals, [{ label: "moved", ...inside(first.influence.at(-1).moved, firstError.influence.at(-1).moved) }])),
        card("(d) Gradient norm", "Over all parameters, for each interval alone. The line is the norm for all tokens.",
          bars(intervals, [{ label: "norm", ...inside(first.norm, firstError.norm) }], { line: first.full })),
        card("(d) Gradient norm per token", "The same, divided by the interval's share of the tokens.",
          bars(intervals, [{ label: "norm", ...inside(first.per_token, firstError.per_token) }])),
        card("(e) Step on the lowest interval alone", "Mean of |Δp|.", alone(0)),
        card("(f) Step on the highest interval alone", "Mean of |Δp|.", alone(last)),
        mean.size && card("At the logits", "Mean of ‖e − π‖, in closed form.", bars(intervals, [{ label: "size", ...inside(mean.size, error.size) }])),
        card("Part in the gradient", "⟨g of the interval, g⟩ / ‖g‖². The parts add up to 100 %.",
          bars(intervals, methods.map((name) => ({ label: name, ...inside(mean.regulators[name].share, error.regulators[name].share) })), { unit: percent })),
        card("Weight", "Mean policy weight, summed over phases.",
          bars(intervals, methods.map((name) => ({ label: name, values: mean.regulators[name].weight, errors: [] })))),
        card("Movement by method", "Mean of |Δp| after the method's whole update.",
          bars(intervals, methods.map((name) => ({ label: name, ...inside(mean.regulators[name].influence.at(-1).moved, error.regulators[name].influence.at(-1).moved) })))),
      ),
      el("p", { class: "bar" }, el("label", {}, "Regulator", pick)), matrices,
      this.displacement(mean, methods), this.suspects(diagnosis.suspects || []));
  },

  displacement(mean, methods) {
    const found = methods.map((name) => [name, mean.regulators[name].displacement]).filter(([, each]) => each);
    if (!found.length) return null;
    return el("div", {}, el("h2", {}, "Correct responses after the update"),
      el("p", { class: "muted" }, "Change of their log-likelihood by one update, one bar per question, sorted. Below zero, the update made correct answers less likely."),
      el("div", { class: "grid" }, found.map(([name, each]) => card(name,
        `mean ${number(each["lld/change"])}; ${percent(each["lld/fallen_share"])} of the correct responses fell`,
        bars(each.questions.map((_, i) => ""), [{ label: "question", values: [...each.questions].sort((a, b) => a - b), errors: [] }])))));
  },

  suspects(tokens) {
    if (!tokens.length) return null;
    return el("div", {}, el("h2", {}, "Tokens of wrong responses that pull correct ones down"),
      el("p", { class: "muted" }, "The tokens with the highest NTHR scores: making them less likely lowers the correct responses of their group most."),
      table(["score", "p", "token", "text before", "batch", "response"],
        tokens.map((t) => [t.score, t.p, el("code", {}, t.text), el("code", { class: "muted" }, t.before), t.step, t.row])));
  },
};

// Grouped bars with whiskers; `line` is a horizontal reference line.
function bars(names, series, { line = null, unit = number } = {}) {
  const values = series.flatMap((s) => s.values.flatMap((v, i) => [(v ?? 0) - (s.errors[i] ?? 0), (v ?? 0) + (s.errors[i] ?? 0)]));
  let [low, high] = extent([...values, 0, line ?? 0]);
  if (low === high) high = 1;
  const y = (v) => 142 - ((v - low) / (high - low)) * 128;
  const labels = ticks(low, high).map((t) => [t, unit(t)]), left = margin(labels.map(([, label]) => label));
  const wide = (322 - left) / names.length, each = (wide * 0.78) / series.length;
  const every = Math.ceil((WIDE * Math.max(0, ...names.map((name) => name.length)) + 4) / wide) || 1; // show every n-th name, so that names have room
  const group = (s, k) => s.values.map((v, i) => {
    if (v === null || v === undefined) return null;
    const x = left + wide * i + wide * 0.11 + each * k, e = s.errors[i];
    const told = [[names[i] || `${i + 1}`, ""], [s.label, unit(v)], e === null || e === undefined ? null : ["standard error", unit(e)]].filter(Boolean);
    return svg("g", { class: "bar-mark", onpointermove: (event) => tip.show(event, tip.list(told)), onpointerleave: tip.hide },
      svg("rect", { x, width: Math.max(each - 1.5, 0.8), y: Math.min(y(v), y(0)), height: Math.max(Math.abs(y(v) - y(0)), 0.7), fill: colour(k), rx: 1.5 }),
      svg("rect", { x, width: each, y: 8, height: 134, fill: "transparent" }),
      e ? svg("line", { x1: x + each / 2, x2: x + each / 2, y1: y(v - e), y2: y(v + e), stroke: "var(--ink)" }) : null);
  });
  const picture = svg("svg", { viewBox: "0 0 330 165", role: "img", "aria-label": series.map((s) => `${s.label}: ${s.values.map(unit).join(", ")}`).join("; ") },
    labels.map(([t, label]) => [svg("line", { class: "axis", x1: left, x2: 322, y1: y(t), y2: y(t) }),
      svg("text", { x: left - 4, y: y(t) + 4, "text-anchor": "end" }, label)]),
    series.map(group),
    line === null ? null : svg("line", { x1: left, x2: 322, y1: y(line), y2: y(line), stroke: "var(--ink)", "stroke-dasharray": "4 3" }),
    names.map((name, i) => i % every === 0 && upright(left + wide * (i + 0.5), 158, name, 330)));
  return series.length > 1
    ? [picture, el("div", { class: "legend" }, series.map((s, k) => el("span", {}, mark(colour(k)), s.label)))]
    : picture;
}

function density(values) {
  const logs = values.map((v) => (v > 0 ? Math.log10(v) : null));
  const low = Math.floor(extent(logs.filter((v) => v !== null))[0]);
  const high = Math.ceil(extent(logs.filter((v) => v !== null))[1]) || 1;
  const y = (v) => 142 - ((v - low) / (high - low || 1)) * 128;
  const labels = ticks(low, high).filter(Number.isInteger).map((t) => [t, number(10 ** t)]), left = margin(labels.map(([, label]) => label));
  const wide = (322 - left) / values.length;
  return svg("svg", { viewBox: "0 0 330 165", role: "img", "aria-label": "density of the tokens over p" },
    labels.map(([t, label]) => [svg("line", { class: "axis", x1: left, x2: 322, y1: y(t), y2: y(t) }),
      svg("text", { x: left - 4, y: y(t) + 4, "text-anchor": "end" }, label)]),
    logs.map((v, i) => v !== null && svg("rect", { x: left + wide * i, width: Math.max(wide - 1, 0.5), y: y(v), height: 142 - y(v), fill: colour(0),
      onpointermove: (event) => tip.show(event, tip.list([[`p ${number(i / values.length)}–${number((i + 1) / values.length)}`, number(values[i])]])), onpointerleave: tip.hide })),
    [0, 0.25, 0.5, 0.75, 1].map((t) => upright(left + (322 - left) * t, 158, t, 330)));
}

// A shaded matrix: warm above zero, cool below. `top` gets the full colour; by default the largest value does.
function heat(rows, columns, values, top = null) {
  const flat = values.flat().filter((v) => v !== null);
  const full = top || most(flat);
  const left = margin(rows), wide = (330 - left) / columns.length, high = 150 / rows.length;
  const room = (text) => WIDE * text.length <= wide; // the tooltip shows text that does not fit
  return svg("svg", { viewBox: "0 0 330 175", role: "img", "aria-label": rows.map((r, i) => `${r}: ${values[i].map(number).join(", ")}`).join("; ") },
    columns.map((name, j) => room(name) && svg("text", { x: left + wide * (j + 0.5), y: 11, "text-anchor": "middle" }, name)),
    rows.map((name, i) => [svg("text", { x: left - 6, y: 18 + high * (i + 0.5) + 4, "text-anchor": "end" }, name),
      columns.map((column, j) => {
        const v = values[i][j];
        const told = tip.list([[`${name} → ${column}`, number(v)]]);
        return [svg("rect", { x: left + wide * j, y: 18 + high * i, width: wide - 2, height: high - 2, rx: 3,
          fill: v === null ? "none" : `rgba(var(${v < 0 ? "--cool" : "--warm"}), ${(0.75 * Math.min(1, Math.abs(v) / full)).toFixed(3)})`,
          stroke: "var(--line)", onpointermove: (event) => tip.show(event, told), onpointerleave: tip.hide }),
          room(number(v)) && svg("text", { class: "value", x: left - 1 + wide * (j + 0.5), y: 18 + high * (i + 0.5) + 4, "text-anchor": "middle", "pointer-events": "none" }, number(v))];
      })]));
}
