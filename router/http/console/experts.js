// How many rows each rank's experts get in each layer: recorded while somebody wants to see it, a
// few steps at a time. Workers tell nothing of it else, so what is asked ends with the look.

const LOOK = { passes: 16, seconds: 5 };
const BETWEEN_LOOKS_MS = 2000;
const RED_EXCESS = 0.25; // rows over the mean that are drawn in full, unless others are more
let expertLoad = null; // of the last look that there was something to see at
let look = null; // what ends the looks that go on

const loads = heatMap($("load"), (rank, layer) => {
  const { layers, times_mean } = expertLoad;
  setText($("experts-at"), `layer ${layers[layer]}, rank ${rank}: ${times_mean[layer][rank].toFixed(2)} times the mean`);
});

function showExperts({ with_experts: instances }) {
  const panel = $("experts");
  if (instances.length) chosenName($("experts-of"), instances.map((one) => one.instance));
  if (panel.hidden === !instances.length) return;
  panel.hidden = !instances.length;
  lookAnew();
}

function drawLoad(load) {
  expertLoad = load;
  const numRanks = load.times_mean[0].length;
  const most = Math.max(1, ...load.times_mean.map((ranks) => Math.max(...ranks)));
  loads.lay(numRanks, load.layers.length);
  loads.shade((rank, layer) => Math.max(0, load.times_mean[layer][rank] - 1) / Math.max(RED_EXCESS, most - 1));
  $("load").setAttribute("aria-label", `ranks by layers; the fullest rank of a layer has ${most.toFixed(2)} times the mean`);
}

function tellOfLoad({ now, floor, times_mean }, { rows, tokens_per_pass }) {
  return `${plural(times_mean[0].length, "rank")}, ${plural(rows, "step")} of ${short(tokens_per_pass)} tokens; `
    + `balancedness ${now.overall.toFixed(3)}, ${percent(now.overall / floor.overall)} of what chance allows`;
}

async function lookOnce(signal) {
  const name = $("experts-of").value;
  const { role } = snapshot.with_experts.find((one) => one.instance === name);
  const query = new URLSearchParams({ ...LOOK, role, worker: name });
  try {
    const answer = await fetch(`/console/experts?${query}`, { signal });
    const told = await answer.json();
    if (answer.ok) drawLoad(told.rank_load[0]);
    setText($("experts-note"), answer.ok ? tellOfLoad(told.rank_load[0], told) : told.error.message);
  } catch {
    if (!signal.aborted) setText($("experts-note"), "no answer");
  }
}

async function lookAnew() { // or no more
  look?.abort();
  look = null;
  const isOpen = $("record").getAttribute("aria-pressed") === "true";
  if (!isOpen || document.hidden || $("experts").hidden) return;
  const { signal } = look = new AbortController();
  while (!signal.aborted) {
    if (!paused) await lookOnce(signal);
    await new Promise((done) => setTimeout(done, BETWEEN_LOOKS_MS));
  }
}

$("record").addEventListener("click", () => {
  const isOpen = $("record").getAttribute("aria-pressed") !== "true";
  $("record").setAttribute("aria-pressed", String(isOpen));
  setText($("record"), isOpen ? "Stop" : "Record");
  setText($("experts-note"), isOpen ? "recording" : "");
  $("experts-body").hidden = !isOpen;
  lookAnew();
});
$("experts-of").addEventListener("change", () => { loads.lay(0, 0); lookAnew(); });
document.addEventListener("visibilitychange", lookAnew);
