// The whole page: tabs, keyboard, and updates while a run is training.

const VIEWS = { curves, dominance: figures, responses: viewer, settings: { view: settings } };
const POLL_EVERY = 2000; // ms between two requests for news of a run

function tabs() {
  const names = Object.keys(VIEWS).filter((name) => name !== "dominance" || data.runs.some((run) => run.diagnose));
  return names.filter((name) => name !== "curves" || data.runs.some((run) => run.steps.length) || names.length < 4);
}

function open(name) {
  const known = tabs();
  const chosen = known.includes(name) ? name : known[0];
  if (location.hash.slice(1) !== chosen) history.replaceState(null, "", `#${chosen}`);
  document.getElementById("tabs").replaceChildren(...known.map((tab) => el("button", {
    type: "button", role: "tab", "aria-selected": String(tab === chosen), onclick: () => open(tab) }, tab)));
  document.getElementById("main").replaceChildren(...(chosen === known[0] ? warnings() : []), ...[shown(chosen)].flat());
  return chosen;
}

// What keeps runs from learning, with what to do about it: on the first page.
function warnings() {
  const lines = data.runs.flatMap((run) => (run.warnings || []).map(({ step, what, remedy }) => el("li", {},
    `${data.runs.length > 1 ? `${run.name}: ` : ""}${what}${step ? ` (after step ${step})` : ""} ${remedy}`)));
  return lines.length ? [el("ul", { class: "verdict warnings", "aria-label": "Warnings" }, lines)] : [];
}

// A view, or the reason why it cannot be drawn: one damaged file must not break the rest of the page.
function shown(name) {
  try {
    return VIEWS[name].view();
  } catch (error) {
    return el("p", { class: "muted" }, `These data cannot be shown: a file of the run is damaged, or was written by another version (${error.message}).`);
  }
}

// Held-out accuracy, settings that differ between runs, cost, environment, and all settings.
function settings() {
  const flat = (value, prefix = "") => (value && typeof value === "object" && !Array.isArray(value)
    ? Object.entries(value).flatMap(([key, inner]) => flat(inner, prefix ? `${prefix}.${key}` : key)) : [[prefix, JSON.stringify(value)]]);
  const maps = data.runs.map((run) => new Map(flat(run.config)));
  const keys = [...new Set(maps.flatMap((map) => [...map.keys()]))];
  const rows = keys.map((key) => [key, ...maps.map((map) => map.get(key) ?? "–")]);
  const differing = rows.filter(([, ...values]) => new Set(values).size > 1);
  const names = data.runs.map((run) => run.name);
  const sum = (run, key) => (run.metrics[key] || []).reduce((a, b) => a + (b || 0), 0);
  const costs = ["time/step", "time/rollout", "time/transfer", "time/score", "time/regulate", "time/record", "time/update"];
  const tokens = ["sampled tokens", ...data.runs.map((run) => run.metrics["tokens/total"]?.at(-1) ?? "–")];
  const cost = costs.filter((key) => data.runs.some((run) => key in run.metrics)).map((key) => [`${key.slice(5)}, total seconds`, ...data.runs.map((run) => sum(run, key))]);
  const where = [...new Set(data.runs.flatMap((run) => Object.keys(run.environment || {})))];
  const accuracy = (run, when) => run.summary?.[when]?.accuracy ?? "–";
  return [
    data.runs.some((run) => run.summary) && el("div", {}, el("h2", {}, "Held-out accuracy"), table(["", ...names],
      ["before", "after"].map((when) => [when, ...data.runs.map((run) => accuracy(run, when))]))),
    names.length > 1 && el("div", {}, el("h2", {}, "Settings that differ"), differing.length ? table(["setting", ...names], differing) : el("p", {}, "None.")),
    el("h2", {}, "Cost"), table(["", ...names], [["steps", ...data.runs.map((run) => run.steps.length)], tokens, ...cost]),
    el("h2", {}, "Environment"), table(["", ...names], where.map((key) => [key, ...data.runs.map((run) => String(run.environment?.[key] ?? "–"))])),
    el("h2", {}, "All settings"), table(["setting", ...names], rows),
  ].filter(Boolean);
}

async function poll() {
  const note = document.getElementById("live");
  try {
    if (await data.changed()) {
      await data.load();
      const busy = document.activeElement?.closest(".bar input, .bar select");
      if (!busy) open(location.hash.slice(1));
    }
    const steps = data.runs.map((run) => run.steps.at(-1) ?? 0).join(", ");
    note.textContent = `live · step ${steps}`;
  } catch (error) {
    note.textContent = error.cause === "server" ? error.message : "the server does not answer; this page shows its last state";
  }
  setTimeout(poll, POLL_EVERY);
}

// Loads the first index. If a file is damaged, or just being replaced, the page says so and asks again.
async function loaded() {
  for (;;) {
    try {
      return await data.load();
    } catch (error) {
      if (!LIVE) throw error;
      document.getElementById("live").textContent = error.cause === "server" ? error.message : "the server does not answer";
      await new Promise((done) => setTimeout(done, POLL_EVERY));
    }
  }
}

async function start() {
  useTheme();
  await loaded();
  const names = visible(data.runs.map((run) => run.name).join(" · "));
  document.getElementById("runs").textContent = names;
  document.title = `poise: ${names}`;
  open(location.hash.slice(1));
  addEventListener("hashchange", () => open(location.hash.slice(1)));
  addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, select, textarea");
    if (event.ctrlKey || event.metaKey || event.altKey || location.hash !== "#responses" || typing) return;
    if (viewer.key(event.key)) event.preventDefault();
  });
  if (LIVE) poll();
}

start();
