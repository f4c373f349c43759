// The stream, the drawer, the keys and the theme.

const STALE_MS = 4000;
let heardAt = 0;
let paused = false;
let source = null;
let opened = null; // what the drawer shows: {kind, id}

function show() {
  if (!snapshot) return;
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (...texts) => words.every((word) => texts.some((text) => text.toLowerCase().includes(word)));
  showHead();
  showTiles();
  showWorkers(matches);
  showTtft(snapshot);
  showRanks(snapshot);
  showExperts(snapshot);
  showLists(snapshot, matches);
  showDrawer();
}

function showHead() {
  const { requests, pool, models, ready, missing, num_processes: number } = snapshot;
  const bad = pool.workers.filter((w) => w.state === "lost" || w.state === "failing").length;
  const model = models.map((one) => one.name).join(", ");
  setText($("model"), model);
  setText($("status").lastChild, ready ? (bad ? `ready, ${bad} in trouble` : "ready") : missing.join(", "));
  setData($("status"), "state", ready && !bad ? "ready" : "problem");
  const covered = requests.pids.length;
  setText($("covers"), `${plural(pool.workers.length, "worker")} \u00b7 `
    + `${covered === number ? number : `${covered} of ${number}`} HTTP process${number === 1 ? "" : "es"} `
    + `\u00b7 up ${span(requests.uptime_s)} \u00b7 ${plural(requests.num_connections, "connection")}`);
  const title = `${bad || !ready ? `(${bad || "!"}) ` : ""}${model} - Tandem`;
  if (document.title !== title) document.title = title;
}

// The stream. A page that nobody sees asks for nothing; the router keeps its history

function connect() {
  source?.close();
  source = null;
  if (document.hidden) return;
  heardAt = performance.now();
  source = new EventSource("/console/data");
  source.addEventListener("history", (event) => {
    past = JSON.parse(event.data);
    if (!paused) drawPast();
  });
  source.addEventListener("snapshot", (event) => {
    heardAt = performance.now();
    if (paused) return;
    snapshot = JSON.parse(event.data);
    show();
    setStale(false);
  });
  source.addEventListener("error", () => {
    if (source?.readyState === EventSource.CLOSED) again();
  });
}

async function again() { // a session that is over is no outage: the page asks for the key
  const answer = await fetch("/console/data").catch(() => null);
  if (answer?.status === 401 || answer?.status === 403) location.reload();
  else setTimeout(connect, 3000);
}

function setStale(isStale) {
  document.body.classList.toggle("stale", isStale);
  if (!isStale) return;
  const since = Math.round((performance.now() - heardAt) / 1000);
  setText($("status").lastChild, snapshot ? `no word for ${since} s, since ${clock(snapshot.at)}` : "no answer");
  setData($("status"), "state", "gone");
}

setInterval(() => {
  if (!document.hidden && !paused && performance.now() - heardAt > STALE_MS) setStale(true);
}, 1000);
document.addEventListener("visibilitychange", connect);

// The drawer: all about one worker or one request

function facts(pairs) {
  return make("dl", "pairs", ...pairs.flatMap(([term, fact]) => [make("dt", "", term), make("dd", "", String(fact))]));
}

function openDrawer(id, kind) {
  if (!id) return;
  opened = { id, kind };
  opened.spark = sparkline();
  opened.body = make("div");
  const curve = kind === "worker" ? [make("h3", "", "Tokens a second, 5 min"), opened.spark] : [];
  $("drawer-body").replaceChildren(opened.body, ...curve);
  setText($("drawer-title"), id);
  setText($("copy"), "Copy");
  showDrawer();
  drawDrawerPast();
  if (!$("drawer").open) $("drawer").showModal();
}

function aboutWorker(w) {
  const pairs = snapshot.pool.pairs.filter((pair) => pair.prefill === w.name || pair.decode === w.name);
  return [["state", w.state], ["role", w.role], [w.state === "lost" ? "lost for" : "up", span(w.age_s)],
    ["address", w.address], ["metrics", w.metrics_address || "-"], ["pid", w.pid || "-"], ["epoch", w.epoch],
    ["ranks of the instance", w.num_ranks], ["transport", w.transport],
    ["batch", w.max_num_requests ? `${w.num_running} of ${plural(w.max_num_requests, "place")}` : w.num_running],
    ["waiting", `${plural(w.num_waiting, "request")}, ${plural(w.num_tokens_waiting, "token")}`],
    ["KV blocks in use", `${percent(w.kv_used)} of ${w.num_blocks}, ${w.num_quarantined_blocks} in quarantine`],
    ["tokens, steps", `${short(w.tokens_s)}/s, ${short(w.steps_s)}/s`],
    ...(w.drafts ? [["drafts", `${short(w.drafts.drafts_s)}/s, right ${acceptance(w)}`],
      ["accept length, budget", `${acceptLength(w)}, ${w.drafts.budget}`]] : []),
    ["KV sent, received", `${moved(w.sent_s)}, ${moved(w.received_s)}`],
    ...pairs.slice(0, 12).map((pair) => [
      pair.prefill === w.name ? `to ${pair.decode}` : `from ${pair.prefill}`, moved(pair.bytes_s)])];
}

function aboutRequest(item) {
  const known = [["model", item.model], ["key", item.key_name || "-"],
    ["prefill", item.prefill || "-"], ["decode", item.decode || "-"],
    ["tokens in", item.num_prompt_tokens], ["tokens out", item.num_output_tokens]];
  if (!item.parts_s) {
    const moves = `${item.num_migrations} times`;
    return [["phase", item.phase], ["age", seconds(item.age_s)], ["moved", moves], ...known];
  }
  return [["ended", clock(item.at)], ["first token", seconds(item.ttft_s)],
    ["in all", seconds(item.total_s)], ...known, ...item.parts_s.map((part, k) => [PARTS[k], seconds(part)])];
}

function showDrawer() {
  if (!opened) return;
  const { requests, pool } = snapshot;
  const find = { worker: () => pool.workers.find((w) => w.name === opened.id),
    live: () => requests.live.find((item) => item.request_id === opened.id),
    slow: () => requests.slowest.find((item) => item.request_id === opened.id) };
  const item = find[opened.kind]();
  const read = opened.kind === "worker" ? aboutWorker : aboutRequest;
  const about = item ? read(item) : [["", "not there any more"]];
  const key = JSON.stringify(about);
  if (opened.key === key || (!item && opened.key)) return;
  opened.key = key;
  opened.body.replaceChildren(facts(about));
}

function drawDrawerPast() {
  if (opened?.kind === "worker") drawSpark(opened.spark, past.workers[opened.id]);
}

// Keys

function stops() { // what the arrows move among, in the order of the page
  const active = document.activeElement;
  const list = active?.closest("#live tbody, #slow tbody");
  const scope = list ?? $(isGrid() ? "grid" : "table");
  return [...scope.querySelectorAll(list ? "tr[tabindex]:not([hidden])" : "[data-name]")];
}

function move(key) {
  const all = stops();
  if (!all.length) return;
  const isHere = (node) => node === document.activeElement || (chosen && node.dataset.name === chosen);
  const at = Math.max(0, all.findIndex(isHere));
  const inGrid = all[0].classList.contains("cell");
  let next = at + (key === "ArrowRight" || (!inGrid && key === "ArrowDown") ? 1 : -1);
  if (inGrid && (key === "ArrowDown" || key === "ArrowUp")) next = above(all, at, key === "ArrowDown" ? 1 : -1);
  if (!all.includes(document.activeElement)) next = at;
  const node = all[Math.min(all.length - 1, Math.max(0, next))];
  if (node.dataset.name) choose(node.dataset.name, true);
  else node.focus();
}

function above(all, at, direction) { // the nearest cell of the next line, up or down
  const boxes = all.map((node) => node.getBoundingClientRect());
  const here = boxes[at];
  let best = at, bestCost = Infinity;
  boxes.forEach((box, number) => {
    const down = (box.top - here.top) * direction;
    const cost = down * 4 + Math.abs(box.left - here.left);
    if (down > 4 && cost < bestCost) [best, bestCost] = [number, cost];
  });
  return best;
}

function openItem(node) {
  if (node?.dataset?.name) openDrawer(node.dataset.name, "worker");
  else if (node?.item) openDrawer(node.item.request_id, node.closest("#live") ? "live" : "slow");
}

const THEMES = ["auto", "dark", "light"];
function setTheme(theme) {
  setData(document.documentElement, "theme", theme);
  setText($("theme"), `Theme: ${theme}`);
  try { localStorage.setItem("tandem-theme", theme); } catch { /* the page works without storage */ }
}

const actions = {
  "/": () => $("filter").focus(),
  "?": () => $("keys").showModal(),
  s: openPrompt,
  g: () => { view = isGrid() ? "table" : "grid"; show(); },
  t: () => setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % 3]),
  p: () => {
    paused = !paused;
    $("pause").setAttribute("aria-pressed", String(paused));
    setText($("pause"), paused ? "Paused" : "Pause");
    if (!paused) { show(); drawPast(); }
  },
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const field = event.target.closest?.("input, select, textarea");
  if (event.key === "Escape" && $("filter").value) { $("filter").value = ""; show(); }
  if (event.key === "Escape" && field) field.blur();
  if (field && !(field === $("filter") && (event.key === "ArrowDown" || event.key === "Enter"))) return;
  if (event.key.startsWith("Arrow")) move(event.key);
  else if (event.key === "Enter" && event.target.closest?.("button:not(.cell)")) return;
  else if (event.key === "Enter") openItem(field ? (isGrid() ? cellOf : rowOf).get(chosen) : document.activeElement);
  else if (actions[event.key]) actions[event.key]();
  else return;
  event.preventDefault();
});
for (const [id, key] of [["pause", "p"], ["theme", "t"], ["help", "?"], ["view", "g"], ["ask", "s"]]) {
  $(id).addEventListener("click", actions[key]);
}
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.querySelector(".close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
}
$("drawer").addEventListener("close", () => { opened = null; });
$("copy").addEventListener("click", async () => {
  await copyText(opened.id, $("drawer"));
  setText($("copy"), "Copied");
});
$("filter").addEventListener("input", show);
$("measure").addEventListener("change", show);
let theme = "auto";
try { theme = localStorage.getItem("tandem-theme") ?? theme; } catch { /* as above */ }
setTheme(THEMES.includes(theme) ? theme : "auto");
connect();
