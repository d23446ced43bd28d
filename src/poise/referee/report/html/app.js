// The whole page: tabs, keyboard, and updates while a run is training.

const VIEWS = { result, curves, dominance: figures, responses: viewer, settings: { view: settings } };
const POLL_EVERY = 2000; // ms between two polls for updates of a run

function tabs() {
  const [figured, trained] = [data.runs.some((run) => run.diagnose), data.runs.some((run) => run.steps.length || run.before || run.warnings.length)];
  if (data.runs.every((run) => !run.config)) return ["responses", "curves"]; // token files of other trainers
  return Object.keys(VIEWS).filter((name) => (name === "dominance" ? figured : !["result", "curves"].includes(name) || trained || !figured));
}

// Opens a tab, or a response: "responses/RUN/STEP/ROW". Whatever had the focus keeps it.
function open(address) {
  const [name, ...at] = address.split("/"), names = tabs(), chosen = names.includes(name) ? name : names[0];
  const focus = document.activeElement?.id;
  if (chosen === "responses") viewer.go(at.map(Number));
  const there = chosen === "responses" ? viewer.address() : chosen;
  goTo(there);
  document.getElementById("tabs").replaceChildren(...names.map((tab) => el("button", {
    type: "button", role: "tab", id: `tab-${tab}`, tabindex: tab === chosen ? 0 : -1, "aria-selected": String(tab === chosen), onclick: () => open(tab) }, tab)));
  document.getElementById("main").replaceChildren(...(chosen === names[0] ? warnings() : []), ...[shown(chosen)].flat());
  if (focus) document.getElementById(focus)?.focus({ preventScroll: true });
}

// Stores the open tab and response in the page's address.
function goTo(address) {
  try {
    if (location.hash.slice(1) !== address) history.replaceState(null, "", `#${address}`);
  } catch { /* browsers limit how often a page may do this */ }
}

// Arrow keys move between tabs while one of them has the focus.
function turn(event) {
  const names = tabs(), at = names.indexOf(document.activeElement.id.slice(4));
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by || at < 0) return;
  event.preventDefault();
  event.stopPropagation();
  const next = names[(at + by + names.length) % names.length];
  open(next);
  document.getElementById(`tab-${next}`).focus();
}

// For the first page: what keeps runs from learning, and what to do about it.
function warnings() {
  const lines = data.runs.flatMap((run) => (run.warnings || []).map(({ step, what, remedy }) => el("li", {},
    `${data.runs.length > 1 ? `${run.name}: ` : ""}${what}${step ? ` (after step ${step})` : ""} `, el("span", { class: "remedy" }, remedy))));
  return lines.length ? [el("ul", { class: "warnings", "aria-label": "Warnings" }, lines)] : [];
}

// A view, or the reason why it cannot be drawn: one damaged file must not break the rest of the page.
function shown(name) {
  try {
    return VIEWS[name].view();
  } catch (error) {
    return el("p", { class: "muted" }, `These data cannot be shown: a file of the run is damaged, or was written by another version (${error.message}).`);
  }
}

// Settings that differ between runs, cost, environment, and all settings.
function settings() {
  const flat = (value, prefix = "") => (value && typeof value === "object" && !Array.isArray(value)
    ? Object.entries(value).flatMap(([key, inner]) => flat(inner, prefix ? `${prefix}.${key}` : key)) : [[prefix, JSON.stringify(value)]]);
  const maps = data.runs.map((run) => new Map(flat(run.config)));
  const keys = [...new Set(maps.flatMap((map) => [...map.keys()]))];
  const rows = keys.map((key) => [key, ...maps.map((map) => map.get(key) ?? "–")]);
  const differing = rows.filter(([, ...values]) => new Set(values).size > 1);
  const names = data.runs.map((run) => run.name);
  const costs = ["time/step", "time/rollout", "time/transfer", "time/score", "time/regulate", "time/record", "time/update"];
  const tokens = ["sampled tokens", ...data.runs.map((run) => run.metrics["tokens/total"]?.at(-1) ?? "–")];
  const cost = costs.filter((key) => data.runs.some((run) => key in run.metrics)).map((key) => [`${key.slice(5)}, total seconds`, ...data.runs.map((run) => sumOf(run, key))]);
  const where = [...new Set(data.runs.flatMap((run) => Object.keys(run.environment || {})))];
  return [
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
      const busy = document.activeElement?.closest(".bar input[type=search], .bar input[type=number], .bar select");
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
  addEventListener("pointerdown", (event) => { if (!event.target.closest?.(".tokens, svg")) tip.hide(); });
  document.getElementById("tabs").addEventListener("keydown", turn);
  addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, select, textarea");
    if (event.ctrlKey || event.metaKey || event.altKey || !/^#responses(\/|$)/.test(location.hash) || typing) return;
    if (viewer.key(event.key)) event.preventDefault();
  });
  if (LIVE) poll();
}

start();
