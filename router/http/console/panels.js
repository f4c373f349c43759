// All but the workers: tiles, time to first token, pairs, requests, failures, events.

let snapshot = null; // the last one that is shown
let past = { series: {}, workers: {} };

const PARTS = ["router", "reserve", "prefill queue", "compute", "between", "transfer left",
  "first decode"];
const NUM_BEFORE_FIRST = 5;
const RATES_OVER = "30 s"; // SPAN_S of rates.py
const percentile = (name) => snapshot.requests.ttft.find((row) => row.name === name);

// Tiles: [title, number, unit, note, level], and the series of the curve

const TILES = [
  ["output", (s) => {
    const rate = past.series.answers?.at(-1);
    return ["Output", short(s.pool.output_tokens_s), "tok/s", rate == null ? "sampled by decode" : `${short(rate)} answers/s`];
  }],
  ["prompt", (s) => ["Prompts", short(s.pool.prompt_tokens_s), "tok/s", "computed by prefill"]],
  ["in_flight", (s) => ["In flight", short(s.requests.num_in_flight), "", `of ${plural(s.requests.max_in_flight, "place")}`]],
  ["waiting", ({ requests: r }) => ["Router queue", short(r.num_waiting), "",
    r.num_waiting ? `the oldest for ${seconds(r.oldest_wait_s)}` : "nobody waits",
    r.oldest_wait_s > 10 ? "warn" : ""]],
  ["ttft", () => {
    const [half, most] = [percentile("p50"), percentile("p99")];
    const [number, unit] = half ? seconds(half.ttft_s).split(" ") : ["-", ""];
    return ["First token, p50", number, unit, most ? `p99 ${seconds(most.ttft_s)}` : "no request yet"];
  }],
  ["decode_kv", () => {
    const [full, other] = ["decode_kv", "prefill_kv"].map((name) => past.series[name]?.at(-1));
    return ["KV in decode", percent(full).replace(" %", ""), "%", `prefill ${percent(other)}`, fullness(full)];
  }],
  ["transfer", (s) => ["KV transfer", ...bytes(s.pool.transfer_s), plural(s.pool.num_pairs, "pair")]],
  ["errors", (s) => {
    const [ours, theirs] = [true, false].map((isOurs) => s.requests.errors.reduce(
      (sum, row) => sum + (row.is_ours === isOurs ? row.num_recent : 0), 0));
    return ["Failed by us, 5 min", short(ours), "", `callers' own: ${short(theirs)}`, ours ? "bad" : ""];
  }],
];
const tiles = TILES.map(([series, read]) => {
  const parts = { series, read, title: make("h2"), number: make("span"), unit: make("small"),
    note: make("p"), spark: sparkline() };
  parts.node = make("article", "tile", parts.title, make("b", "", parts.number, parts.unit), parts.note, parts.spark);
  $("tiles").append(parts.node);
  return parts;
});

function showTiles() {
  for (const tile of tiles) {
    const [title, number, unit, note, level = ""] = tile.read(snapshot);
    setText(tile.title, title);
    setText(tile.number, number);
    setText(tile.unit, unit);
    setText(tile.note, note);
    setData(tile.node, "level", level);
  }
}

// Rows that stay: a list with as many rows as there ever is room for

function fixedRows(section, number, columns, choose) {
  const body = $(section).querySelector("tbody");
  return Array.from({ length: number }, () => {
    const cells = columns.map((name) => make("td", name));
    const row = make("tr", "", ...cells);
    row.hidden = true;
    if (choose) row.addEventListener("click", () => choose(row.item));
    for (const cell of cells) {
      if (cell.classList.contains("id")) cell.addEventListener("click", (event) => copyId(event, cell, row.item));
    }
    body.append(row);
    return { row, cells, canBeChosen: Boolean(choose), isNote: false };
  });
}

// Ids: whole for who points at them or copies them, without their middle where there is no room

const shortId = (id) => (id.length > 17 ? `${id.slice(0, 8)}\u2026${id.slice(-8)}` : id);

function writeId(cell, id) {
  setText(cell, shortId(id));
  const title = `${id}\nclick to copy`;
  if (cell.title !== title) cell.title = title;
}

async function copyText(text, near) { // without TLS a browser has no clipboard for scripts but this one
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = make("textarea", "sr");
  field.value = text;
  near.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

async function copyId(event, cell, item) {
  if (!item) return;
  event.stopPropagation();
  await copyText(item.request_id, cell);
  setText(cell, "copied"); // until the next snapshot
}

function fill(rows, items, none, write) {
  rows.forEach((known, number) => {
    const { row, cells } = known;
    const item = items[number];
    const isNote = !item && number === 0;
    if (row.hidden !== (!item && !isNote)) row.hidden = !row.hidden;
    if (known.isNote !== isNote) {
      known.isNote = isNote;
      row.classList.toggle("empty", isNote);
      for (const cell of cells) { cell.replaceChildren(); cell.shownText = ""; }
      if (isNote) setText(cells[0], none);
    }
    if (item) write(cells, item);
    if (known.canBeChosen && Boolean(row.item) !== Boolean(item)) {
      if (item) row.tabIndex = number ? -1 : 0; else row.removeAttribute("tabindex");
    }
    row.item = item;
  });
}

function splitBar(thin) {
  const bar = make("div", thin ? "bar thin" : "bar", ...PARTS.map((_, k) => make("i", `k${k}`)));
  bar.setAttribute("role", "img");
  return bar;
}

function drawSplit(bar, parts) {
  const total = parts.reduce((sum, part) => sum + part, 0) || 1;
  parts.forEach((part, k) => setShare(bar.children[k], 98 * part / total));
  const largest = parts.indexOf(Math.max(...parts));
  const label = `mostly ${PARTS[largest]}, ${seconds(parts[largest])}`;
  if (bar.title !== label) { bar.title = label; bar.setAttribute("aria-label", label); }
}

// Time to first token

const bars = ["p50", "p90", "p99"].map((name) => {
  const row = { name, time: make("b"), bar: splitBar(false) };
  $("bars").append(make("span", "dim", name), row.time, row.bar);
  return row;
});
const partRows = PARTS.map((name, k) => {
  const cells = bars.map(() => make("td", "n"));
  const note = k < NUM_BEFORE_FIRST ? "" : ", after it";
  const label = make("td", "", make("i", `k${k}`), name, make("span", "dim", note));
  $("parts").tBodies[0].append(make("tr", "", label, ...cells));
  return cells;
});

function showTtft({ requests }) {
  setText($("ttft-note"), requests.num_finished
    ? `${plural(requests.num_finished, "request")} in ${span(requests.finished_span_s)}; bars show shares`
    : "no request yet");
  bars.forEach(({ name, time, bar }, column) => {
    const row = percentile(name);
    setText(time, row ? seconds(row.ttft_s) : "-");
    drawSplit(bar, row ? row.parts_s : PARTS.map(() => 0));
    partRows.forEach((cells, k) => setText(cells[column], row ? seconds(row.parts_s[k]) : "-"));
  });
}

// Pairs, requests, events, failures

const pairRows = fixedRows("pairs", 8, ["", "", "", "n"]);
const liveRows = fixedRows("live", 10, ["id", "n", "", "wide dim", "wide dim", "n"],
  (item) => openDrawer(item?.request_id, "live"));
const slowRows = fixedRows("slow", 8, ["id", "n dim", "n", "c-split", "wide dim", "wide dim"],
  (item) => openDrawer(item?.request_id, "slow"));
const errorRows = fixedRows("errors", 32, ["", "", "n", "n dim"]);
slowRows.forEach(({ cells }) => { cells[3].bar = splitBar(true); });
pairRows.forEach(({ cells }) => { cells[2].meter = make("div", "meter", make("i")); });
const draftRows = fixedRows("drafts", 8, ["", "n", "n", "n", "n"], (item) => openDrawer(item?.name, "worker"));
const whose = (item) => [item.model, item.key_name].filter(Boolean).join(", ");
const where = (item) => (item.prefill ? `${item.prefill} \u2192 ${item.decode}` : "-");

function showLists({ pool, requests }, matches) {
  const pairs = pool.pairs.filter((pair) => matches(pair.prefill, pair.decode));
  setText($("pairs-note"), pool.num_pairs
    ? `${plural(pool.num_pairs, "pair")}, ${moved(pool.transfer_s)} in all, over ${RATES_OVER}` : "");
  fill(pairRows, pairs, `nothing was sent in the last ${RATES_OVER}`, (cells, pair) => {
    setText(cells[0], pair.prefill);
    setText(cells[1], pair.decode);
    if (!cells[2].firstChild) cells[2].append(cells[2].meter);
    setShare(cells[2].meter, pair.bytes_s / pool.pairs[0].bytes_s);
    setText(cells[3], moved(pair.bytes_s));
  });
  setText($("live-note"), `${requests.num_live} in the workers' hands`);
  const live = requests.live.filter((item) => matches(item.request_id, item.phase, item.prefill, item.decode, whose(item)));
  fill(liveRows, live, "nothing is in flight", (cells, item) => {
    writeId(cells[0], item.request_id);
    setText(cells[1], seconds(item.age_s));
    setText(cells[2], item.num_migrations ? `${item.phase} (moved ${item.num_migrations}x)` : item.phase);
    setText(cells[3], whose(item));
    setText(cells[4], where(item));
    setText(cells[5], `${item.num_prompt_tokens} + ${item.num_output_tokens}`);
  });
  setText($("slow-note"), "that ended in the last 5 min");
  const slow = requests.slowest.filter((item) => matches(item.request_id, item.prefill, item.decode, whose(item)));
  fill(slowRows, slow, "no request yet", (cells, item) => {
    writeId(cells[0], item.request_id);
    setText(cells[1], clock(item.at));
    setText(cells[2], seconds(item.ttft_s));
    if (!cells[3].firstChild) cells[3].append(cells[3].bar);
    drawSplit(cells[3].bar, item.parts_s);
    setText(cells[4], whose(item));
    setText(cells[5], where(item));
  });
  showDrafts(pool.workers, matches);
  fill(errorRows, requests.errors, "none so far", (cells, row) => {
    setText(cells[0], row.code);
    setText(cells[1], row.is_ours ? "ours" : "caller's");
    cells[0].classList.toggle("ours", row.is_ours);
    setText(cells[2], String(row.num_recent));
    setText(cells[3], String(row.num));
  });
  showEvents(requests.events.filter((event) => matches(event.instance, event.kind, event.text, event.role)));
}

// Drafts: who has the fewest right stands first

const acceptLength = ({ drafts }) => drafts.accept_length?.toFixed(2) ?? "-";
const acceptance = ({ drafts }) => drafts.acceptance.map(percent).join(", ") || "-";

function showDrafts(workers, matches) {
  const drafting = workers.filter((w) => w.drafts);
  if ($("drafts").hidden !== !drafting.length) $("drafts").hidden = !drafting.length;
  const sum = drafting.reduce((total, w) => total + w.drafts.drafts_s, 0);
  const ranks = plural(drafting.length, "decode rank");
  setText($("drafts-note"), `${ranks}, ${short(sum)} drafts/s; those with the fewest right first`);
  const shown = drafting.filter((w) => matchesWorker(matches, w))
    .sort((a, b) => (a.drafts.accept_length ?? Infinity) - (b.drafts.accept_length ?? Infinity));
  fill(draftRows, shown, "no such rank", (cells, w) => {
    setText(cells[0], w.name);
    setText(cells[1], acceptLength(w));
    setText(cells[2], acceptance(w));
    setText(cells[3], short(w.drafts.drafts_s));
    setText(cells[4], String(w.drafts.budget));
  });
}

const TOGETHER_S = 10;
const eventList = document.querySelector("#events ol");
let shownEvents = "";

function ranksOf({ ranks }) {
  const [first, last] = [ranks[0], ranks.at(-1)];
  if (ranks.length === 1) return `/${first}`;
  return last - first + 1 === ranks.length ? ` ranks ${first}-${last}` : ` ranks ${ranks.join(" ")}`;
}

function together(events) { // runs of instances that did the same at about the same time
  const runs = [];
  for (const event of events) {
    const last = runs.at(-1)?.[0];
    const isSame = last && last.kind === event.kind && last.text === event.text && last.at - event.at < TOGETHER_S;
    if (isSame) runs.at(-1).push(event); else runs.push([event]);
  }
  return runs;
}

function showEvents(events) {
  const key = events.map((event) => `${event.at} ${event.kind} ${event.ranks.length}`).join();
  if (key === shownEvents && eventList.firstChild) return;
  shownEvents = key;
  const rows = together(events).map((run) => {
    const [event] = run;
    const names = run.map((one) => `${one.instance}${ranksOf(one)}`).join(", ");
    const text = `${run.length > 1 ? `${run.length}: ` : ""}${names}${event.text && `: ${event.text}`}`;
    const row = make("li", "", make("span", "dim", clock(event.at)), make("b", "", event.kind),
      make("span", "", text));
    row.dataset.kind = event.kind;
    row.title = text;
    return row;
  });
  eventList.replaceChildren(...(rows.length ? rows : [make("li", "empty", "nothing has happened")]));
}
