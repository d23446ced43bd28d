// Responses: a list that draws only its visible rows, and the chosen response token by token.

const HEIGHT = 46; // pixels of a list row, as in page.css

const total = (b, i) => (b.weights.length ? b.weights.reduce((sum, name) => sum + b[name][i], 0) : 1);
const SHADES = {
  probability: { of: (b, i) => Math.exp(b.logp[i]), at: (v) => [1 - v, "warm"], ends: ["p = 1", "p = 0"], note: "more colour: less likely" },
  weight: { of: total, middle: 1, low: 0, note: "summed over phases; warm: above 1, cool: below 1" },
  advantage: { of: (b, i) => b.advantage[i], middle: 0, note: "warm: positive, cool: negative" },
  gradient: {
    of: (b, i) => Math.abs(total(b, i) * b.advantage[i]) * (b.size ? b.size[i] : -Math.expm1(b.logp[i])), middle: 0, low: 0,
    note: "w·|A|·‖e − π‖ if measured, otherwise w·|A|·(1 − p), its part at the sampled token",
  },
  nthr: { of: (b, i) => b.nthr[i], middle: 0, note: "NTHR score, for tokens of wrong responses; warm: lowering it lowers correct responses too" },
  change: { of: (b, i) => b.change[i], middle: 0, note: "Δ log p by the measured update" },
  entropy: { of: (b, i) => b.entropy[i], middle: 0, low: 0, note: "of the distribution that the token was drawn from, in nats" },
};

// The shades that a run's fields allow.
const FIELDS = { probability: ["logp"], gradient: ["logp", "advantage"] }; // any other shade needs the field with its name
const recorded = (run, name) => run.fields.some((field) => field === name || field.startsWith(`${name}/`));
const shadesOf = (run) => Object.keys(SHADES).filter((shade) => (FIELDS[shade] || [shade]).every((name) => recorded(run, name)));

// A response's verdict, if known; and the known parts of a line, joined.
const verdict = (row, right, wrong) => (row.correct === null ? "" : row.correct ? right : wrong);
const joined = (...parts) => parts.filter(Boolean).join(" · ");

const ROLES = new Map([["first", "first attempt"], ["second", "second attempt"]]); // other roles keep their algorithm's name
const roleOf = (role) => ROLES.get(role) ?? role;

const viewer = {
  shade: "probability", filter: {}, shown: [], selected: null, pinned: null, token: -1, search: 0,
  folded: new Set(), // parts of a response that the reader has closed
  wanted: null, // the linked response, to which the list should scroll

  view() {
    const values = (name) => [...new Set(data.rows.map((row) => row[name]))].sort((a, b) => (a > b ? 1 : -1));
    if (!data.rows.length) return [el("p", { class: "muted" }, "No responses were recorded. To record them, train with rollouts_every=10, for example.")];
    this.roles = values("role");
    const choice = (label, name, options) => el("label", {}, label, el("select", { id: `f-${name}`, onchange: (e) => this.change(name, e.target.value) },
      el("option", { value: "" }, "all"), options.map(([value, text]) => el("option", { value, selected: this.filter[name] === String(value) }, text ?? value))));
    const limit = (label, name) => el("label", {}, label, el("input", { type: "number", step: "any", id: `f-${name}`, value: this.filter[name] ?? "",
      oninput: (e) => this.change(name, e.target.value) }));
    const top = this.list?.scrollTop ?? 0, before = [...(this.panes?.children ?? [])]; // a refresh must not scroll the page
    this.count = el("span", { class: "muted", id: "count", role: "status" }, this.count?.textContent ?? "");
    this.space = el("div", { class: "space", style: { height: this.space?.style.height ?? "" } });
    this.list = el("div", { class: "list", id: "list", tabindex: 0, role: "listbox", "aria-label": "Responses", onscroll: () => this.rows(), onkeydown: (e) => this.arrow(e) }, this.space);
    this.panes = el("div", { class: "panes", id: "panes" }, before);
    this.comparing = el("button", { type: "button", id: "pin", onclick: () => this.pin() }, this.comparing?.textContent ?? "Compare");
    const shades = Object.keys(SHADES).filter((name) => data.runs.some((run) => shadesOf(run).includes(name)));
    if (!shades.includes(this.shade)) this.shade = shades[0] ?? "probability";
    const view = [
      el("div", { class: "bar" },
        data.runs.length > 1 && choice("Run", "run", data.runs.map((run, i) => [i, run.name])),
        choice("Step", "step", values("step").map((s) => [s])),
        values("difficulty").some(Boolean) && choice("Difficulty", "difficulty", values("difficulty").map((d) => [d])),
        data.rows.some((row) => row.correct !== null) && choice("Verdict", "correct", [["true", "correct"], ["false", "wrong"]]),
        this.roles.length > 1 && choice("Role", "role", this.roles.map((role) => [role, roleOf(role)])),
        limit("Reward from", "from"), limit("to", "to"),
        el("label", {}, "Search", el("input", { type: "search", id: "search", value: this.filter.text ?? "", placeholder: "in prompt and response",
          oninput: (e) => this.change("text", e.target.value) })),
        el("label", {}, "Shading", el("select", { id: "shade", onchange: (e) => { this.shade = e.target.value; this.show(); } },
          shades.map((name) => el("option", { selected: name === this.shade }, name)))),
        this.comparing, this.count),
      el("p", { class: "hints" }, el("kbd", {}, "j"), " ", el("kbd", {}, "k"), " next and previous response · ", el("kbd", {}, "←"), " ", el("kbd", {}, "→"),
        " token · ", el("kbd", {}, "Esc"), " close its values · ", el("kbd", {}, "s"), " shading · ", el("kbd", {}, "c"), " compare · ", el("kbd", {}, "/"), " search"),
      this.missing && el("p", { class: "muted", role: "status" }, "The response of this link is not in this report."),
      el("div", { class: "viewer" }, this.list, this.panes),
    ].filter(Boolean);
    requestAnimationFrame(() => {
      this.list.scrollTop = top;
      this.apply();
    });
    return view;
  },

  change(name, value) { this.filter[name] = value; this.apply(); },

  // Shows the rows that pass the filters. A search goes through the texts a few at a time.
  async apply() {
    const f = this.filter, mine = ++this.search;
    const candidates = data.rows.filter((row) =>
      ["run", "step", "difficulty", "correct", "role"].every((name) => !f[name] || String(row[name]) === f[name]) &&
      (!f.from || row.reward >= Number(f.from)) && (!f.to || row.reward <= Number(f.to)));
    const wanted = (f.text || "").toLowerCase();
    if (!wanted) return this.found(candidates, candidates.length, candidates.length);
    const found = [];
    for (let i = 0; i < candidates.length; i += 1) {
      const row = candidates[i];
      const hit = data.texts[row.prompt].toLowerCase().includes(wanted) || (await data.block(row)).text.toLowerCase().includes(wanted);
      if (mine !== this.search) return undefined; // another search has begun
      if (hit) found.push(row);
      if (i % 25 === 24) {
        if (i % 100 === 99) this.found([...found], i + 1, candidates.length);
        await new Promise((done) => setTimeout(done)); // let the page breathe
      }
    }
    return this.found(found, candidates.length, candidates.length);
  },

  found(rows, looked, of) {
    this.shown = rows;
    this.count.textContent = `${many(rows.length)} of ${many(data.rows.length)} responses${looked < of ? ` (searched ${many(looked)})` : ""}`;
    this.space.style.height = `${rows.length * HEIGHT}px`;
    const still = rows.find((row) => this.same(row, this.selected));
    if (!still) this.token = -1;
    this.selected = still || rows[0] || null;
    if (this.wanted) this.reveal(rows.findIndex((row) => this.same(row, this.wanted)));
    this.wanted = null;
    this.rows();
    this.show();
  },

  // The fragment of the page's address that links to the chosen response.
  address() { return this.selected ? `responses/${this.selected.run}/${this.selected.step}/${this.selected.row}` : "responses"; },

  // Chooses the linked response, and clears filters that may hide it.
  go(at) {
    const [run, step, row] = at, found = data.rows.find((each) => this.same(each, { run, step, row }));
    this.missing = at.length > 0 && !found;
    if (!found || this.same(found, this.selected)) return;
    Object.assign(this, { selected: found, wanted: found, token: -1, filter: {} });
  },

  same: (a, b) => Boolean(a && b) && a.run === b.run && a.step === b.step && a.row === b.row,

  rows() {
    const first = Math.max(0, Math.floor(this.list.scrollTop / HEIGHT) - 4);
    const last = Math.min(this.shown.length, Math.ceil((this.list.scrollTop + this.list.clientHeight) / HEIGHT) + 4);
    this.space.replaceChildren(...this.shown.slice(first, last).map((row, i) => el("div", {
      class: "item", role: "option", id: `row-${first + i}`, "aria-selected": String(this.same(row, this.selected)), style: { top: `${(first + i) * HEIGHT}px` },
      onclick: () => this.select(first + i) },
      el("b", { class: row.correct ? "right" : "wrong" }, verdict(row, "✓ ", "✗ ")),
      joined(row.reward !== null && number(row.reward), `step ${row.step}`, `${row.length} tokens`), this.role(row),
      el("small", {}, joined(data.runs.length > 1 && data.runs[row.run].name, row.difficulty, row.problem)))));
    if (this.selected) this.list.setAttribute("aria-activedescendant", `row-${this.shown.findIndex((row) => this.same(row, this.selected))}`);
  },

  // A row's role in its algorithm, if rows have different roles.
  role(row) { return this.roles.length > 1 && ` · ${roleOf(row.role)}`; },

  select(i) {
    if (!this.shown[i]) return;
    this.choose(this.shown[i]);
    this.reveal(i);
  },

  choose(row) {
    this.selected = row;
    this.token = -1;
    this.rows();
    this.show();
  },

  // Scrolls the list to a row.
  reveal(i) {
    const top = i * HEIGHT;
    if (top < this.list.scrollTop) this.list.scrollTop = top;
    if (top + HEIGHT > this.list.scrollTop + this.list.clientHeight) this.list.scrollTop = top + HEIGHT - this.list.clientHeight;
  },

  // Arrow keys in the list choose rows, as in any list.
  arrow(event) {
    const at = this.shown.findIndex((row) => this.same(row, this.selected)), page = Math.floor(this.list.clientHeight / HEIGHT), last = this.shown.length - 1;
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.select(Math.max(0, Math.min(last, to)));
  },

  move(by) { this.select(this.shown.findIndex((row) => this.same(row, this.selected)) + by); },

  // Keeps the chosen response and shows another beside it: the other run's response to the same problem, if it exists.
  pin() {
    this.pinned = this.pinned ? null : this.selected;
    const other = this.pinned && data.rows.find((row) => row.run !== this.pinned.run && row.problem === this.pinned.problem && row.step === this.pinned.step);
    if (other) this.token = -1;
    if (other) this.selected = other;
    this.rows();
    this.show();
  },

  // Draws the chosen responses. Focus stays, also on the token that the arrow keys reached.
  async show() {
    tip.hide();
    const [pinned, selected] = [this.pinned, this.selected], wanted = [pinned, selected].filter(Boolean);
    const panes = await Promise.all(wanted.map(async (row, i) => this.pane(row, await data.block(row), i)));
    if (selected !== this.selected || pinned !== this.pinned) return; // the user has chosen another response meanwhile
    const focus = this.panes.contains(document.activeElement) && document.activeElement.id;
    this.panes.replaceChildren(...(panes.length ? panes : [el("p", { class: "muted" }, "No response matches these filters.")]));
    this.spans()[this.token]?.classList.add("at");
    if (focus) document.getElementById(focus)?.focus({ preventScroll: true });
    this.comparing.textContent = this.pinned ? "Stop comparing" : "Compare";
    if (this.panes.isConnected) goTo(this.address());
  },

  spans() { return [...this.panes.querySelectorAll(".pane:last-child .tokens span")]; },

  // A section of a response that the reader can close; then it stays closed in the next response.
  fold(title, content, open = true) {
    return el("details", { open: open && !this.folded.has(title), ontoggle: (event) => this.folded[event.target.open ? "delete" : "add"](title) }, el("summary", {}, title), content);
  },

  pane(row, block, place) {
    const shading = SHADES[this.shade];
    const shaded = shadesOf(data.runs[row.run]).includes(this.shade);
    const values = Array.from(block.id, (_, i) => (shaded ? shading.of(block, i) : NaN));
    // If a scale starts below its middle, as weights do at 0, its colours reach at least to that start.
    const farthest = Math.max(most(values.map((v) => v - (shading.middle ?? 0))), shading.middle - shading.low || 0);
    const at = shading.at || ((v) => [Math.abs(v - shading.middle) / farthest, v < shading.middle ? "cool" : "warm"]);
    const spans = block.words.map((word, i) => {
      const shown = visible(word);
      const [strength, tone] = Number.isFinite(values[i]) ? at(values[i]) : [0, "warm"];
      return el("span", { "data-i": i, class: shown !== word && "odd", style: { background: strength > 0.004 ? `rgba(var(--${tone}), ${(0.62 * Math.min(1, strength)).toFixed(3)})` : "" } }, shown.replaceAll("\n", "↵\n"));
    });
    const turns = spans.flatMap((span, i) => block.environment.has(i + 1)
      ? [span, el("div", { class: "environment", "aria-label": "The environment" }, block.environment.get(i + 1))] : [span]);
    const tokens = el("div", { class: "tokens", id: `tokens-${place}`, tabindex: 0, "aria-label": "Response, token by token" }, turns);
    const tell = (event) => {
      const i = event.target.dataset?.i;
      if (i === undefined) return tip.hide();
      return tip.show(event, el("b", {}, JSON.stringify(block.words[i])), tip.list(this.facts(block, Number(i))));
    };
    tokens.addEventListener("pointermove", tell);
    tokens.addEventListener("pointerdown", tell);
    tokens.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && tip.hide());
    const [low, high] = [shading.low ?? shading.middle - farthest, shading.middle + farthest];
    const ends = shading.ends || [number(low), number(high)];
    const ramp = shading.ends || shading.low === shading.middle ? "linear-gradient(90deg, transparent, rgba(var(--warm), .62))"
      : `linear-gradient(90deg, rgba(var(--cool), ${(0.62 * (shading.middle - low)) / farthest}), transparent ${(100 * (shading.middle - low)) / (high - low)}%, rgba(var(--warm), .62))`;
    return el("section", { class: "card pane" },
      el("h3", {}, `${[verdict(row, "Correct", "Wrong"), row.reward !== null && `reward ${number(row.reward)}`].filter(Boolean).join(", ") || `Step ${row.step}`} `, el("a", { class: "link", href: `#responses/${row.run}/${row.step}/${row.row}`, title: "A link to this response" }, "link")),
      el("p", {}, `${data.runs[row.run].name} · step ${row.step} · response ${row.row} · ${row.length} tokens${row.finished === false ? ", cut off" : ""}`, this.role(row), [row.difficulty, row.problem].filter(Boolean).map((part) => ` · ${part}`)),
      this.retry(row),
      data.texts[row.prompt] && this.fold("Prompt", el("pre", { class: "prompt" }, data.texts[row.prompt])),
      data.texts[row.read] && this.fold("What the model reads", el("pre", { class: "prompt" }, data.texts[row.read]), false),
      tokens,
      el("div", { class: "scale", style: { background: ramp } }), el("div", { class: "ends" }, el("span", {}, ends[0]), el("span", {}, `${this.shade}: ${shading.note}`), el("span", {}, ends[1])),
      this.answers(row),
      row.reward !== null && this.fold("Parts of the score", table(["part", "value"], [...Object.entries(row.parts).map(([k, v]) => [k, v]), ["reward", row.reward]])),
      Object.keys(row.notes).length > 0 && this.fold("Notes of the algorithm", table(["note", "value"], Object.entries(row.notes))),
      this.fold("Plain text", el("pre", { class: "prompt plain" }, block.text), block.text.length < 1e5)); // a longer text takes long to lay out
  },

  // The right answer, and the answer that the verifier read in the response.
  answers(row) {
    const [gold, answer] = [row.gold, row.answer].map((i) => (i === null ? null : data.texts[i]));
    const read = answer !== null || data.rows.some((other) => other.run === row.run && other.answer !== null); // whether the task reports it
    return (gold !== null || answer !== null) && el("dl", { class: "answers" },
      gold !== null && [el("dt", {}, "Right answer"), el("dd", { class: "gold" }, gold)],
      read && [el("dt", {}, "Answer that was read"), el("dd", {}, answer ?? el("i", { class: "muted" }, "none"))]);
  },

  // Buttons for the rows that belong to one attempt, such as its reflection and the second attempt.
  retry(row) {
    const key = ["run", "step", "problem"];
    const mates = data.rows.filter((other) => row.notes.attempt !== undefined && other.notes.attempt === row.notes.attempt && key.every((name) => other[name] === row[name]));
    return mates.length > 1 && el("p", { class: "bar", "aria-label": "The rows of this retry" }, mates.map((mate) =>
      el("button", { type: "button", "aria-pressed": String(this.same(mate, row)), onclick: () => this.choose(mate) }, roleOf(mate.role))));
  },

  facts(b, i) {
    const rows = b.logp ? [["p", exactly(Math.exp(b.logp[i]))], ["log p", exactly(b.logp[i])]] : [];
    for (const [name, label] of [["sampler_logp", "log p, sampler"], ["entropy", "entropy"], ["advantage", "advantage"]]) if (b[name]) rows.push([label, exactly(b[name][i])]);
    for (const name of b.weights) rows.push([b.weights.length > 1 ? `weight, ${name.slice(7)}` : "weight", exactly(b[name][i])]);
    if (b.logp && b.advantage) rows.push(["gradient", exactly(SHADES.gradient.of(b, i))]);
    for (const [name, label] of [["size", "‖e − π‖"], ["nthr", "NTHR score"], ["change", "Δ log p"]]) if (b[name]) rows.push([label, exactly(b[name][i])]);
    return [...rows, ["token", `${i + 1} of ${b.length}`]];
  },

  // Moves to the previous or next token, and shows its values.
  step(by) {
    const spans = this.spans();
    if (!spans.length) return;
    spans[this.token]?.classList.remove("at");
    this.token = Math.min(spans.length - 1, Math.max(0, this.token + by));
    const span = spans[this.token];
    span.classList.add("at");
    span.scrollIntoView({ block: "nearest" });
    const box = span.getBoundingClientRect();
    tip.closed = null;
    span.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX: box.left, clientY: (box.top + box.bottom) / 2 }));
  },

  key(key) {
    if (key === "j") this.move(1);
    else if (key === "k") this.move(-1);
    else if (key === "ArrowRight") this.step(1);
    else if (key === "ArrowLeft") this.step(-1);
    else if (key === "c") this.pin();
    else if (key === "/") document.getElementById("search").focus();
    else if (key === "s") {
      const box = document.getElementById("shade");
      box.selectedIndex = (box.selectedIndex + 1) % box.options.length;
      this.shade = box.value;
      this.show();
    } else return false;
    return true;
  },
};
