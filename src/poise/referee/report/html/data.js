// Reads the page's data from elements of this file or from the server that sent the page.

const LIVE = document.documentElement.dataset.live === "true";
const CACHED = 200; // decoded responses to keep

const data = {
  runs: [], rows: [], texts: [], stamp: "", axes: {}, x: "step",
  blocks: new Map(),

  async load() {
    const index = LIVE
      ? await (await ask("/index")).json()
      : JSON.parse(document.getElementById("data").textContent);
    const same = this.stamp === index.stamp;
    this.stamp = index.stamp;
    this.blocks.clear();
    this.runs = index.runs;
    this.axes = index.axes;
    this.x = index.x;
    this.texts = index.texts;
    this.rows = index.rows.map((row, number) =>
      Object.assign(Object.fromEntries(index.columns.map((name, i) => [name, row[i]])), { number }));
    return !same;
  },

  async changed() {
    return (await (await ask("/stamp")).text()) !== this.stamp;
  },

  // One response, token by token: { text, words, and one array per field }.
  async block(row) {
    const key = `${row.run}/${row.step}/${row.row}`;
    if (this.blocks.has(key)) return this.blocks.get(key);
    const packed = LIVE
      ? new Uint8Array(await (await ask(`/block/${key}`)).arrayBuffer())
      : Uint8Array.from(atob(document.getElementById(`b${row.number}`).textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const bytes = await new Response(stream).arrayBuffer();
    const block = unpack(bytes, this.runs[row.run], row.length);
    if (this.blocks.size >= CACHED) this.blocks.delete(this.blocks.keys().next().value);
    this.blocks.set(key, block);
    return block;
  },
};

// The server's answer. Throws an Error with the server's message if the server reports a problem.
async function ask(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error((await answer.text()).trim(), { cause: "server" });
  return answer;
}

function unpack(bytes, run, count) {
  let at = 0;
  const text = () => {
    const size = new DataView(bytes).getUint32(at, true);
    const found = new TextDecoder().decode(new Uint8Array(bytes, at + 4, size));
    at += 4 + Math.ceil(size / 4) * 4;
    return found;
  };
  const [response, environment] = [text(), text()];
  const block = Object.create(null); // a field may have any name, even "__proto__"
  for (const name of run.fields) {
    if (at + 4 * count > bytes.byteLength) break;
    block[name] = name === "id" ? new Int32Array(bytes, at, count) : new Float32Array(bytes, at, count);
    at += 4 * count;
  }
  block.text = response;
  block.environment = new Map(environment ? JSON.parse(environment) : []); // number of tokens before a message -> the message
  block.length = count;
  block.words = Array.from(block.id, (i) => run.words[i]);
  block.weights = Object.keys(block).filter((name) => name.startsWith("weight/"));
  return block;
}
