// Who waits for whom among the ranks of an instance: a map of R x R, and what is slow.

const RED_SHARE = 0.1; // of a step: a wait that is drawn in full, unless another is longer
let shownFindings = "";

const waits = heatMap($("heat"), (receiver, source) => {
  if (!snapshot) return;
  const share = chosenRanks(snapshot.ranks).wait_shares[receiver][source];
  setText($("ranks-at"), `rank ${receiver} waits ${(100 * share).toFixed(2)} % of a step for rank ${source}`);
});

function chosenRanks(pictures) {
  const name = chosenName($("ranks-of"), pictures.map((picture) => picture.instance));
  return pictures.find((picture) => picture.instance === name);
}

function showRanks({ ranks }) {
  const panel = $("ranks");
  if (panel.hidden !== !ranks.length) panel.hidden = !ranks.length;
  if (!ranks.length) return;
  const picture = chosenRanks(ranks);
  const faults = picture.findings.filter((found) => found.is_fault).length;
  const longest = Math.max(RED_SHARE, ...picture.wait_shares.map((row) => Math.max(...row)));
  waits.lay(picture.num_ranks, picture.num_ranks, (receiver, source) => (receiver === source ? "own" : ""));
  waits.shade((receiver, source) => picture.wait_shares[receiver][source] / longest);
  const slow = faults ? `${plural(faults, "rank")} or links slow` : "nothing is slow";
  setText($("ranks-note"), `${plural(picture.num_ranks, "rank")}, ${seconds(picture.step_s)} a step, the last 100; ${slow}`);
  $("heat").setAttribute("aria-label", `rows wait for columns; ${slow}`);
  const key = JSON.stringify(picture.findings.map((found) => found.text));
  if (key === shownFindings) return;
  shownFindings = key;
  const rows = picture.findings.map((found) => {
    const row = make("li", "", make("b", "", found.text), make("p", "dim", found.advice));
    row.dataset.fault = String(found.is_fault);
    return row;
  });
  $("findings").replaceChildren(...(rows.length ? rows : [make("li", "empty", "every rank keeps up")]));
}

$("ranks-of").addEventListener("change", () => { if (snapshot) showRanks(snapshot); });
