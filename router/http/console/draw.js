"use strict";
// What every part of the page is drawn with. The files are one script, in this order: draw, panels,
// ranks, experts, workers, prompt, console. Texts are set as text, never as markup: names and ids are of others.

const $ = (id) => document.getElementById(id);

// Nodes and texts

function make(tag, className = "", ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

function setText(node, text) {
  if (node.shownText !== text) node.textContent = node.shownText = text;
}

function setData(node, name, value) {
  if (node.dataset[name] !== value) node.dataset[name] = value;
}

function setShare(node, value) {
  const text = value.toFixed(2);
  if (node.shownShare !== text) node.style.setProperty("--v", node.shownShare = text);
}

function sparkline() {
  const node = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  node.setAttribute("class", "spark");
  node.setAttribute("viewBox", "0 0 59 20");
  node.setAttribute("preserveAspectRatio", "none");
  node.setAttribute("aria-hidden", "true");
  for (const name of ["area", "line"]) {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("class", name);
    node.append(path);
  }
  return node;
}

function drawSpark(node, values = [], least = 0) {
  const top = Math.max(least, ...values.map((v) => v ?? 0)) || 1;
  let line = "", area = "", runStart = null;
  values.forEach((value, x) => {
    if (value === null) return;
    const y = (19 - 18 * value / top).toFixed(1);
    const begins = x === 0 || values[x - 1] === null;
    if (begins) runStart = x;
    line += `${begins ? "M" : "L"}${x} ${y}`;
    area += `${begins ? `M${x} 20L` : "L"}${x} ${y}`;
    if (x === values.length - 1 || values[x + 1] === null) area += `L${x} 20L${runStart} 20Z`;
  });
  if (node.shownLine === line) return;
  node.shownLine = line;
  node.firstChild.setAttribute("d", area);
  node.lastChild.setAttribute("d", line);
}

// Maps of shaded cells, rows by columns; `tell` is called with the place of the cell that is pointed at

function heatMap(node, tell) {
  let shape = "", cells = [];
  node.addEventListener("mouseover", ({ target }) => { if (target.place) tell(...target.place); });
  return {
    lay(numRows, numColumns, classOf = () => "") {
      if (shape === `${numRows} ${numColumns}`) return;
      shape = `${numRows} ${numColumns}`;
      cells = Array.from({ length: numRows * numColumns }, (_, at) => {
        const place = [Math.floor(at / numColumns), at % numColumns];
        return Object.assign(make("i", classOf(...place)), { place });
      });
      node.style.setProperty("--columns", numColumns);
      node.style.setProperty("--rows", numRows);
      node.style.setProperty("--gap", numRows > 24 ? "0px" : "1px");
      node.replaceChildren(...cells);
    },
    shade(shareOf) { for (const cell of cells) setShare(cell, shareOf(...cell.place)); },
  };
}

function chosenName(list, names) { // of a list that offers these
  if (list.shownNames !== names.join()) {
    const before = list.value;
    list.shownNames = names.join();
    list.replaceChildren(...names.map((name) => make("option", "", name)));
    if (names.includes(before)) list.value = before;
  }
  return list.value;
}

// Numbers

function short(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(value < 1e7 ? 2 : 1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(value < 1e5 ? 1 : 0)} k`;
  return value < 10 && value % 1 ? value.toFixed(1) : value.toFixed(0);
}

function bytes(rate) {
  const [unit, size] = [["GB/s", 1e9], ["MB/s", 1e6], ["kB/s", 1e3]].find(([, s]) => rate >= s) ?? ["B/s", 1];
  return [(rate / size).toFixed(rate / size < 99.95 && rate ? 1 : 0), unit];
}

const moved = (rate) => (rate ? bytes(rate).join(" ") : "none");

function seconds(value) {
  if (value < 0.01) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 1) return `${(value * 1e3).toFixed(0)} ms`;
  return value < 100 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : span(value);
}

function span(value) {
  if (value === null) return "-";
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const [unit, size] = units.find(([, s]) => value >= 2 * s) ?? units[3];
  return `${Math.floor(value / size)} ${unit}`;
}

const percent = (share) => (share === null || share === undefined ? "-" : `${Math.round(share * 100)} %`);
const plural = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour12: false });
const fullness = (share) => (share >= 0.97 ? "bad" : share >= 0.9 ? "warn" : "");
