// Who waits for whom among the ranks of an instance: a map of R x R, and what is slow.

const RED_SHARE = 0.1; // of a step: a wait that is drawn in full, unless another is longer
let heatSize = 0;
let heatCells = [];
let shownFindings = "";

function layHeat(size) {
  if (size === heatSize) return;
  heatSize = size;
  heatCells = Array.from({ length: size * size }, (_, at) => {
    const cell = make("i", Math.floor(at / size) === at % size ? "own" : "");
    cell.at = at;
    return cell;
  });
  $("heat").style.setProperty("--size", size);
  $("heat").style.setProperty("--gap", size > 24 ? "0px" : "1px");
  $("heat").replaceChildren(...heatCells);
}

function chosenRanks(pictures) {
  const list = $("ranks-of");
  const names = pictures.map((picture) => picture.instance);
  if (list.shownNames !== names.join()) {
    const before = list.value;
    list.shownNames = names.join();
    list.replaceChildren(...names.map((name) => make("option", "", name)));
    if (names.includes(before)) list.value = before;
  }
  return pictures.find((picture) => picture.instance === list.value) ?? pictures[0];
}

function showRanks({ ranks }) {
  const panel = $("ranks");
  if (panel.hidden !== !ranks.length) panel.hidden = !ranks.length;
  if (!ranks.length) return;
  const picture = chosenRanks(ranks);
  const faults = picture.findings.filter((found) => found.is_fault).length;
  layHeat(picture.num_ranks);
  const longest = Math.max(RED_SHARE, ...picture.wait_shares.map((row) => Math.max(...row)));
  heatCells.forEach((cell) => {
    const [receiver, source] = [Math.floor(cell.at / heatSize), cell.at % heatSize];
    setShare(cell, picture.wait_shares[receiver][source] / longest);
  });
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

$("heat").addEventListener("mouseover", ({ target }) => {
  if (target.at === undefined || !snapshot) return;
  const picture = chosenRanks(snapshot.ranks);
  const [receiver, source] = [Math.floor(target.at / heatSize), target.at % heatSize];
  const share = picture.wait_shares[receiver][source];
  setText($("ranks-at"), `rank ${receiver} waits ${(100 * share).toFixed(2)} % of a step for rank ${source}`);
});
$("ranks-of").addEventListener("change", () => { if (snapshot) showRanks(snapshot); });
