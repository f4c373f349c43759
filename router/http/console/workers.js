// The workers: a table while they are few, a grid of shaded cells when they are many.

const GRID_FROM = 33; // so many are shown as a grid unless somebody chose
const columns = ["", "c-state state", "c-host wide dim", "c-age n wide dim", "c-batch n", "c-queue n", "c-kv",
  "c-rate n", "c-rate n wide", "c-spark wide"];
const rowOf = new Map(); // by name; made once, kept while the worker is shown
const cellOf = new Map();
let chosen = ""; // name of the worker that the keys are at
let view = ""; // "table" or "grid"; empty: by their number
let shownOrder = "";

// Rows that are scrolled out of sight are left as they are until they are seen again.
const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    target.isSeen = isIntersecting;
    const w = isIntersecting && snapshot.pool.workers.find((one) => one.name === target.dataset.name);
    if (!w) continue;
    writeRow(target, w);
    drawSpark(target.cells_[9].spark, past.workers[w.name]);
  }
}, { root: $("table"), rootMargin: "60px" });

const isGrid = () => (view ? view === "grid" : snapshot.pool.workers.length >= GRID_FROM);
const matchesWorker = (matches, w) => matches(w.name, w.host, w.state, w.role);

// How much of a worker is in use, by what was chosen: [share of 1, what stands in the cell]

const MEASURES = {
  kv: (w) => [w.kv_used ?? 0, w.kv_used === null ? "-" : String(Math.round(w.kv_used * 100))],
  batch: (w, most) => [w.num_running / (w.max_num_requests || most), short(w.num_running)],
  waiting: (w, most) => [w.num_waiting / most, short(w.num_waiting)],
  tokens: (w, most) => [w.tokens_s / most, short(w.tokens_s).replace(" ", "")],
};
const COUNTED = { kv: () => 1, batch: (w) => w.num_running, waiting: (w) => w.num_waiting, tokens: (w) => w.tokens_s };

function choose(name, focus) {
  chosen = name;
  const node = (isGrid() ? cellOf : rowOf).get(name);
  for (const other of document.querySelectorAll(".chosen")) other.classList.remove("chosen");
  for (const other of document.querySelectorAll("#workers [tabindex='0']:not(.body)")) other.tabIndex = -1;
  if (!node) return;
  node.classList.add("chosen");
  node.tabIndex = 0;
  if (focus) { node.focus({ preventScroll: true }); node.scrollIntoView({ block: "nearest" }); }
  showDetail();
}

function makeRow(w) {
  const cells = columns.map((name) => make("td", name));
  const row = make("tr", "", ...cells);
  row.cells_ = cells;
  cells[6].meter = make("div", "meter", make("i"), make("span"));
  cells[6].append(cells[6].meter);
  cells[9].spark = sparkline();
  cells[9].append(cells[9].spark);
  row.addEventListener("click", () => { choose(w.name); openDrawer(w.name, "worker"); });
  row.tabIndex = -1;
  row.dataset.name = w.name;
  row.isSeen = true;
  watcher.observe(row);
  return row;
}

function writeRow(row, w) {
  const [name, state, host, age, batch, queue, kv, rate, kvRate] = row.cells_;
  setText(name, w.name);
  setText(state, w.state);
  setData(state, "state", w.state);
  setText(host, w.host);
  setText(age, span(w.age_s));
  setText(batch, w.max_num_requests ? `${w.num_running} of ${w.max_num_requests}` : String(w.num_running));
  setText(queue, short(w.num_waiting));
  setShare(kv.meter, w.kv_used ?? 0);
  setData(kv.meter, "level", fullness(w.kv_used ?? 0));
  setText(kv.meter.lastChild, percent(w.kv_used));
  setText(rate, short(w.tokens_s));
  setText(kvRate, moved(w.sent_s || w.received_s));
}

function makeCell(w) {
  const cell = make("button", "cell");
  cell.type = "button";
  cell.tabIndex = -1;
  cell.dataset.name = w.name;
  cell.dataset.role = w.role;
  cell.addEventListener("click", () => { choose(w.name); openDrawer(w.name, "worker"); });
  cell.addEventListener("pointerenter", () => choose(w.name));
  cell.addEventListener("focus", () => choose(w.name));
  return cell;
}

function writeCell(cell, w, read, most) {
  const [share, text] = w.state === "lost" ? [0, "\u00d7"] : read(w, most);
  setShare(cell, Math.min(1, share));
  setText(cell, text);
  if (cell.dataset.state === w.state) return;
  cell.dataset.state = w.state;
  cell.setAttribute("aria-label", `${w.name}, ${w.state}`);
}

const keep = (map, w, create) => map.get(w.name) ?? map.set(w.name, create(w)).get(w.name);
const groups = (items, read) => Map.groupBy(items, read);

function layOutTable(workers) {
  const bodies = [...groups(workers, (w) => w.role)].map(([role, members]) => {
    const hosts = new Set(members.map((w) => w.host)).size;
    const count = `${plural(members.length, "worker")}, ${plural(hosts, "host")}`;
    const head = make("th", "", make("b", "", role), make("span", "dim", count));
    head.colSpan = columns.length;
    head.scope = "rowgroup";
    const body = make("tbody", "", make("tr", "", head), ...members.map((w) => keep(rowOf, w, makeRow)));
    body.dataset.role = role;
    return body;
  });
  const table = $("table").firstElementChild;
  for (const body of [...table.tBodies]) body.remove();
  table.append(...bodies);
}

function layOutGrid(workers) {
  const most = Math.min(8, Math.max(0, ...[...groups(workers, (w) => w.host).values()].map((all) => all.length)));
  const sections = [...groups(workers, (w) => w.role)].flatMap(([role, members]) => {
    const hosts = [...groups(members, (w) => w.host)].map(([host, there]) => {
      const cells = make("div", "cells", ...there.map((w) => keep(cellOf, w, makeCell)));
      return make("div", "host", make("p", "", host), cells);
    });
    const count = make("span", "", `${plural(members.length, "worker")}, ${plural(hosts.length, "host")}`);
    const row = make("div", "hosts", ...hosts);
    row.style.setProperty("--columns", most);
    return [make("h4", role, role, count), row];
  });
  $("grid").replaceChildren(...sections);
}

function showWorkers(matches) {
  const workers = snapshot.pool.workers.filter((w) => matchesWorker(matches, w));
  const grid = isGrid();
  const order = `${grid} ${workers.map((w) => `${w.name} ${w.host}`).join()}`;
  if (order !== shownOrder) {
    shownOrder = order;
    const present = new Set(workers.map((w) => w.name));
    for (const [name, row] of rowOf) if (!present.has(name)) watcher.unobserve(row);
    for (const map of [rowOf, cellOf]) for (const name of map.keys()) if (!present.has(name)) map.delete(name);
    $("grid").hidden = !grid;
    $("table").hidden = grid;
    setText($("view"), grid ? "Table" : "Grid");
    const focused = document.activeElement?.dataset.name;
    (grid ? layOutGrid : layOutTable)(workers);
    if (!workers.some((w) => w.name === chosen)) chosen = workers[0]?.name ?? "";
    choose(chosen, Boolean(focused));
    drawPast();
  }
  const measure = $("measure").value;
  const most = Math.max(1, ...workers.map(COUNTED[measure]));
  for (const w of workers) {
    if (grid) writeCell(cellOf.get(w.name), w, MEASURES[measure], most);
    else if (rowOf.get(w.name).isSeen) writeRow(rowOf.get(w.name), w);
  }
  const states = groups(snapshot.pool.workers, (w) => w.state);
  setText($("counts"), ["ready", "draining", "failing", "lost"].filter((state) => states.has(state))
    .map((state) => `${states.get(state).length} ${state}`).join(", ") || "none has registered");
  showDetail();
}

function showDetail() {
  const w = snapshot?.pool.workers.find((worker) => worker.name === chosen);
  const text = !w || !isGrid() ? "" : [w.name, w.state, w.host, `up ${span(w.age_s)}`,
    `batch ${w.num_running}`, `waiting ${w.num_waiting}`, `KV ${percent(w.kv_used)}`,
    `${short(w.tokens_s)} tok/s`, `KV moved ${moved(w.sent_s || w.received_s)}`].join(" \u00b7 ");
  setText($("detail"), text || "Enter opens a worker, / filters, ? lists the keys");
}

// The curves change only with a point of history, every 5 s

function drawPast() {
  for (const tile of tiles) drawSpark(tile.spark, past.series[tile.series], tile.series.endsWith("_kv") ? 1 : 0);
  for (const [name, row] of snapshot && !isGrid() ? rowOf : []) {
    if (row.isSeen) drawSpark(row.cells_[9].spark, past.workers[name]);
  }
  drawDrawerPast();
}
