// The page of `poise compare`: verdict, forest plot, curves with bands, tables. Scores are shown in percentage points.

const comparison = JSON.parse(document.getElementById("data").textContent);
const baseline = comparison.arms.find((arm) => arm.name === comparison.baseline);
const rivals = comparison.arms.filter((arm) => arm !== baseline);

const LOST = ["cut_off", "unreadable"];
const REPEATS = ["pass@1", "maj@1", ...(comparison.settings?.evaluation?.temperature === 0 ? ["greedy"] : [])]; // these equal accuracy

const points = (value) => (known(value) ? (100 * value).toFixed(1) : "–");
const signed = (value) => (known(value) ? `${value >= 0.0005 ? "+" : ""}${(Math.round(1000 * value) / 10 || 0).toFixed(1)}`.replace("-", "−") : "–");
const range = (ends, show) => (ends ? ` [${show(ends[0])}, ${show(ends[1])}]` : "");
const chance = (p) => (p < 0.001 ? "< 0.001" : String(Number(p.toPrecision(2))));
const power = (value) => (known(value) ? value.toExponential(2) : "–");
const rate = (value) => (value < 0.01 ? Number(value.toPrecision(6)).toExponential() : String(value)); // as a user types it: 1e-4
const shade = (arm) => colour(comparison.arms.indexOf(arm));

// One row for each arm: its difference to the baseline with the interval. Dashes mark the smallest detectable difference.
function forest() {
  const shown = rivals.filter((arm) => known(arm.difference.mean));
  if (!shown.length) return el("p", { class: "muted" }, "No seed is complete yet.");
  const ends = shown.flatMap(({ difference: d }) => [...d.values, ...(d.interval || [])]);
  let [low, high] = extent([...ends, 0, ...(known(comparison.detectable) ? [comparison.detectable, -comparison.detectable] : [])]);
  if (low === high) { low -= 0.01; high += 0.01; }
  const x = (value) => 222 + ((value - low) / (high - low)) * 388;
  const bottom = 14 + 26 * shown.length;
  const upright = (value, attributes) => svg("line", { x1: x(value), x2: x(value), y1: 6, y2: bottom, ...attributes });
  const row = (arm, i) => {
    const d = arm.difference, y = 22 + 26 * i;
    const told = [["difference", signed(d.mean)], ["interval", range(d.interval, signed)], ["by", d.method || "–"],
      ["p, corrected", known(d.p_adjusted) ? chance(d.p_adjusted) : "–"], ["seeds", d.seeds.length]];
    return svg("g", { class: "forest-row", onpointermove: (event) => tip.show(event, el("b", {}, arm.name), tip.list(told)), onpointerleave: tip.hide },
      svg("rect", { x: 0, y: y - 13, width: 780, height: 26, fill: "transparent" }),
      svg("text", { class: "value", x: 214, y: y + 4, "text-anchor": "end" }, arm.name.length > 32 ? `${arm.name.slice(0, 31)}…` : arm.name),
      d.interval && svg("line", { x1: x(d.interval[0]), x2: x(d.interval[1]), y1: y, y2: y, stroke: shade(arm), "stroke-width": 2,
        "stroke-dasharray": d.method === "student" ? "4 3" : null }),
      d.values.map((value) => svg("circle", { class: "seed", cx: x(value), cy: y + 9, r: 2.5, fill: "var(--muted)", opacity: 0.8 })),
      svg("circle", { cx: x(d.mean), cy: y, r: 4.5, fill: shade(arm) }),
      svg("text", { class: "value", x: 622, y: y + 4 }, `${signed(d.mean)}${range(d.interval, signed)}`));
  };
  const label = shown.map((arm) => `${arm.name}: ${signed(arm.difference.mean)}${range(arm.difference.interval, signed)}`).join("; ");
  return svg("svg", { viewBox: `0 0 780 ${bottom + 36}`, role: "img", "aria-label": label },
    ticks(low, high, 6).map((t) => [upright(t, { class: "axis" }), svg("text", { x: x(t), y: bottom + 15, "text-anchor": "middle" }, signed(t))]),
    upright(0, { stroke: "var(--ink)" }),
    known(comparison.detectable) && [comparison.detectable, -comparison.detectable].map((t) => upright(t, { class: "cross" })),
    shown.map(row),
    svg("text", { x: 400, y: bottom + 31, "text-anchor": "middle" }, `points against ${baseline.name}`));
}

// The forest plot's caption: it explains only what the plot shows.
function caption() {
  const drawn = rivals.map((arm) => arm.difference).filter((d) => known(d.mean));
  const intervals = drawn.filter((d) => d.interval);
  return [`Points paired by seed: the mean (large)${intervals.length ? ", its interval," : ""} and every seed (small, below).`,
    intervals.some((d) => d.method === "student") && "A dashed interval is Student's, where there are too few seeds for an exact one.",
    known(comparison.detectable) && "The dashed lines are the smallest detectable difference."].filter(Boolean).join(" ");
}

// Mean curves over steps, tokens or seconds, with the interval of the mean at every evaluation.
function bands(by) {
  const arms = comparison.arms.filter((arm) => arm.curve.steps.length);
  if (!arms.length) return el("p", { class: "muted" }, "Nothing has been measured yet.");
  let [x0, x1] = extent(arms.flatMap((arm) => arm.curve[by]));
  if (x0 === x1) x1 = x0 + 1;
  let [low, high] = extent(arms.flatMap(({ curve }) => [...curve.mean, ...curve.low, ...curve.high].filter(known)));
  low = Math.max(0, low); high = Math.min(1, high);
  if (low >= high) { low -= 0.01; high += 0.01; }
  const x = (value) => 40 + ((value - x0) / (x1 - x0)) * 282;
  const y = (value) => 142 - ((Math.min(high, Math.max(low, value)) - low) / (high - low)) * 130;
  const path = (xs, ys) => xs.map((value, i) => `${i ? "L" : "M"}${x(value).toFixed(1)} ${y(ys[i]).toFixed(1)}`).join("");
  const draw = (arm) => {
    const c = arm.curve, xs = c[by], back = [...xs.keys()].reverse();
    const closed = c.low.every(known) && `${path(xs, c.high)}L${path(back.map((i) => xs[i]), back.map((i) => c.low[i])).slice(1)}Z`;
    return [closed && svg("path", { d: closed, fill: shade(arm), opacity: 0.13 }),
      svg("path", { d: path(xs, c.mean), fill: "none", stroke: shade(arm), "stroke-width": 1.6, "stroke-dasharray": DASHES[comparison.arms.indexOf(arm) % DASHES.length] || null }),
      xs.map((value, i) => svg("circle", { cx: x(value), cy: y(c.mean[i]), r: 4, fill: "transparent", onpointerleave: tip.hide,
        onpointermove: (event) => tip.show(event, el("b", {}, arm.name), tip.list([[by, large(value)], ["accuracy", points(c.mean[i])],
          ["interval", known(c.low[i]) ? range([c.low[i], c.high[i]], points) : "–"]])) }))];
  };
  return [svg("svg", { viewBox: "0 0 330 170", role: "img", "aria-label": `accuracy over ${by}: ${arms.map((arm) => arm.name).join(", ")}` },
    ticks(low, high).map((t) => [svg("line", { class: "axis", x1: 40, x2: 322, y1: y(t), y2: y(t) }), svg("text", { x: 35, y: y(t) + 4, "text-anchor": "end" }, points(t))]),
    ticks(x0, x1, 4).map((t) => upright(x(t), 160, large(t), 330)),
    arms.map(draw)),
  el("div", { class: "legend" }, arms.map((arm) => el("span", {}, mark(shade(arm), DASHES[comparison.arms.indexOf(arm) % DASHES.length]), `${arm.name} ${points(arm.curve.mean.at(-1))}`)))];
}

function tables() {
  const names = [...new Set(comparison.arms.flatMap((arm) => Object.keys(arm.scores)))].filter((name) => !name.startsWith("avg@") && ![...LOST, ...REPEATS].includes(name));
  const lost = (arm, name) => (arm.scores[name] ? `${points(arm.scores[name].before)} → ${points(arm.scores[name].mean)}` : "–");
  const timed = known(comparison.cut);
  const p = (found) => (!found ? "" : known(found.mean) && known(found.p_adjusted) ? chance(found.p_adjusted) : "–");
  const result = (arm) => [`${arm.name}${arm.control ? " (control)" : ""}`, arm.seeds.length, `${points(arm.accuracy)}${range(arm.interval, points)}`, ...LOST.map((name) => lost(arm, name)),
    arm.difference ? `${signed(arm.difference.mean)}${range(arm.difference.interval, signed)}` : "baseline",
    p(arm.difference), ...(timed ? [arm.speed ? arm.speed.text : "1", p(arm.speed)] : []), large(arm.cost.tokens), power(arm.cost.flop), large(arm.cost.optimizer_steps), large(arm.cost.seconds)];
  const secondary = (arm, name) => {
    const found = arm.scores[name];
    return found ? `${points(found.mean)}${found.difference ? ` (${signed(found.difference.mean)}${range(found.difference.interval, signed)})` : ""}` : "–";
  };
  const other = (arm) => [arm.name, points(arm.before), ...names.map((name) => secondary(arm, name))];
  const spread = ({ name, difference: d }) => [name, points(d.spread), points(d.detectable)];
  const course = (arm) => [arm.name, Object.keys(arm.diverged).length, arm.stability.collapsed,
    known(arm.stability.entropy_start) ? `${number(arm.stability.entropy_start)} → ${number(arm.stability.entropy_end)}` : "–"];
  const seeds = (arm) => [arm.name, ...comparison.seeds.map((seed) => (String(seed) in arm.results
    ? `${points(arm.results[seed])}${String(seed) in arm.diverged ? " (diverged)" : ""}` : "not finished"))];
  const differing = [...new Set(comparison.arms.flatMap((arm) => Object.keys(arm.settings)))];
  const titles = ["arm", "seeds", "accuracy", "cut off", "unreadable", "difference", "p", ...(timed ? ["speed", "p (speed)"] : []), "tokens", "≈ FLOP", "optimizer steps", "seconds"];
  const { exploratory = [] } = comparison;
  return [
    el("h2", {}, "Results and cost"),
    el("p", { class: "muted" }, `Accuracy in points with its ${100 * comparison.level} % interval over seeds; the difference is paired by seed; p is corrected by Holm's method. `
      + "Next to it are the percentages of answers that were cut off or unreadable, before and after training. "
      + (timed ? `All after ${comparison.cut} steps. Speed: the steps after which ${baseline.name} has the arm's accuracy, over the arm's. ` : "")
      + "Cost is the mean of a run, without evaluations; FLOP is an estimate."),
    table(titles, comparison.arms.map(result)),
    ...(exploratory.length ? [el("h2", {}, "Exploratory"),
      el("p", { class: "muted" }, "This includes arms and seeds that were added after the plan was registered. The verdict on the registered ones does not use them."),
      table(titles, exploratory.map(result))] : []),
    el("h2", {}, "Other scores"),
    el("p", { class: "muted" }, "Scores in points; brackets show the difference from the baseline. These intervals are not corrected for multiple comparisons."),
    table(["arm", "before", ...names], comparison.arms.map(other)),
    el("h2", {}, "Spread of the differences"),
    el("p", { class: "muted" }, "Standard deviation over seeds, and the smallest detectable difference, in points."),
    table(["arm", "spread", "detectable"], rivals.map(spread)),
    el("h2", {}, "Course of training"),
    el("p", { class: "muted" }, "Runs that diverged or ended far below their best; entropy at start and end."),
    table(["arm", "diverged", "collapsed", "entropy"], comparison.arms.map(course)),
    el("h2", {}, "Every seed"), table(["arm", ...comparison.seeds.map((seed) => `seed ${seed}`)], comparison.arms.map(seeds)),
    el("h2", {}, "Settings"), table(["arm", ...differing], comparison.arms.map((arm) => [arm.name, ...differing.map((key) => (!(key in arm.settings) ? "–" : typeof arm.settings[key] === "number" ? rate(arm.settings[key]) : String(arm.settings[key])))])),
  ];
}

// How the comparison was made: learning rates, runs without a result.
function conditions() {
  const { tuning = [], failures = [] } = comparison;
  const rates = (tuned) => tuned.rates.map((each) => `${rate(each.rate)}: ${points(each.mean)}${each.diverged ? ` (${each.diverged} diverged)` : ""}`).join(", ");
  return [
    tuning.length && [el("h2", {}, "Learning rates"),
      el("p", { class: "muted" }, "Mean accuracy of each on the tuning seeds, which the comparison does not use again."),
      table(["arm", "chosen", "all"], tuning.map((tuned) => [tuned.arm, known(tuned.chosen) ? rate(tuned.chosen) : "not yet", rates(tuned)]))],
    failures.length && [el("h2", {}, "Runs that failed"),
      table(["arm", "seed", "ended", "log"], failures.map((failure) => [failure.arm, String(failure.seed), failure.ended, failure.log]))],
  ].flat().filter(Boolean);
}

useTheme();
document.getElementById("runs").textContent = visible(`comparison with ${baseline.name}`);
document.title = visible(`poise: comparison with ${baseline.name}`);
document.getElementById("main").replaceChildren(
  el("h2", {}, "Verdict"), el("ul", { class: "verdict" }, comparison.verdict.map((sentence) => el("li", {}, sentence))),
  el("h2", {}, "Differences"),
  card(`Held-out accuracy against ${baseline.name}`, caption(), el("div", { class: "scroll" }, forest())),
  el("h2", {}, "Curves"),
  el("div", { class: "grid" }, ["steps", "tokens", "seconds"].map((by) => card(`Held-out accuracy over ${by}`, "in points; the band is the interval of the mean over seeds", bands(by)))),
  ...tables(), ...conditions());
