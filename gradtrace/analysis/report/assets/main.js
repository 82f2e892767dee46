// Puts the page together: the controls, what a click does, and one range of steps for all charts.

const ROOMY = 40; // rows of the heatmap that a screen has room for
const CONTROL = Object.fromEntries(
  ["tensor", "statistic", "depth", "from", "to", "log", "filter"].map((id) => [id, document.getElementById(id)]),
);
const tensorShown = () => CONTROL.tensor.value;

function fillSelect(select, options, value) {
  select.replaceChildren(...options.map(([key, label]) => new Option(label, key, false, String(key) === String(value))));
}

function fillControls() {
  const tensors = Object.keys(DATA.tensors);
  const failing = DATA.failure && tensors.includes(DATA.failure.tensor) ? DATA.failure.tensor : null;
  const first = failing || ["grad", "output"].find((name) => tensors.includes(name)) || tensors[0];
  fillSelect(CONTROL.tensor, tensors.map((name) => [name, name]), first);
  fillSelect(CONTROL.statistic, Object.entries(STATISTICS).map(([key, { label }]) => [key, label]), "norm");
  const depth = roomyDepth(ROOMY);
  const depths = Array.from({ length: TREE.deepest + 1 }, (_, level) => [level, level === TREE.deepest ? `${level} (all)` : level]);
  fillSelect(CONTROL.depth, depths, Math.min(depth, TREE.deepest));
  foldTo(depth);
}

const redrawHeatmap = () => drawHeatmap(tensorShown(), CONTROL.statistic.value);

async function redrawLines() {
  drawChips(redrawLines);
  await drawLines(tensorShown(), CONTROL.log.checked);
}

async function redrawAll() {
  await drawCourse();
  if (!HAS_TENSORS) return;
  await redrawHeatmap();
  await redrawLines();
}

function chooseModule(module) {
  if (!HAS_TENSORS) return undefined;
  const own = DATA.tensors[tensorShown()].modules.includes(module);
  choose({ module, end: own ? module + 1 : TREE.end[module] });
  return redrawLines();
}

async function setSteps(range) {
  const [least, most] = allSteps();
  const wanted = range && [Math.max(least, Math.min(...range)), Math.min(most, Math.max(...range))];
  const next = wanted && wanted[1] > wanted[0] && (wanted[0] > least || wanted[1] < most) ? wanted : null;
  if (String(next) === String(shownSteps)) return;
  shownSteps = next;
  sayRange();
  if (HAS_TENSORS && columnGroup() !== heatmapGroup) await redrawHeatmap();
  for (const chart of CHARTS) await Plotly.relayout(chart, { "xaxis.range": rangeOfSteps() });
}

function sayRange() {
  const [first, last] = rangeOfSteps();
  CONTROL.from.value = Math.ceil(first);
  CONTROL.to.value = Math.floor(last);
}

function listenToControls() {
  CONTROL.tensor.addEventListener("change", () => redrawHeatmap().then(redrawLines));
  CONTROL.statistic.addEventListener("change", redrawHeatmap);
  CONTROL.depth.addEventListener("change", () => {
    foldTo(Number(CONTROL.depth.value));
    redrawHeatmap();
  });
  CONTROL.log.addEventListener("change", redrawLines);
  CONTROL.filter.addEventListener("input", () => filterTable(CONTROL.filter.value));
  const typed = () => setSteps([Number(CONTROL.from.value) - 0.5, Number(CONTROL.to.value) + 0.5]).then(sayRange);
  CONTROL.from.addEventListener("change", typed);
  CONTROL.to.addEventListener("change", typed);
  document.getElementById("all-steps").addEventListener("click", () => setSteps(null));
  document.getElementById("clear").addEventListener("click", () => {
    chosenRows = [];
    redrawLines();
  });
}

function listenToCharts() {
  const tips = new Map([[COURSE, courseTip], [HEATMAP, heatmapTip], [LINES, lineTip]]);
  for (const chart of CHARTS) {
    const words = tips.get(chart);
    chart.on("plotly_hover", ({ points, event }) => showTip(event, words(points[0])));
    chart.on("plotly_unhover", hideTip);
  }
  watchSteps(setSteps);
  if (!HAS_TENSORS) return;
  HEATMAP.on("plotly_click", ({ points }) => {
    choose(heatmapRows[points[0].pointIndex[0]]);
    redrawLines();
  });
  HEATMAP.addEventListener("click", (event) => {
    const tick = event.target.closest(".ytick text");
    if (tick) labelClicked(heatmapRows[tick.__data__.x]);
  });
}

function labelClicked(row) {
  if (!hasChildren(row.module)) {
    choose(row);
    redrawLines();
    return;
  }
  toggleFold(row.module);
  redrawHeatmap();
}

function redrawOnChange() {
  let waiting = 0;
  let width = window.innerWidth;
  const later = () => {
    clearTimeout(waiting);
    waiting = setTimeout(redrawAll, 150);
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", later);
  window.addEventListener("resize", () => {
    if (window.innerWidth !== width) later();
    width = window.innerWidth;
  });
}

async function start() {
  document.getElementById("charts").hidden = DATA.grid.count === 0;
  document.getElementById("modules").hidden = DATA.modules.name.length === 0;
  for (const element of document.querySelectorAll(".of-modules")) element.hidden = !HAS_TENSORS;
  drawTable(chooseModule);
  if (HAS_TENSORS) fillControls();
  if (DATA.failure && DATA.failure.module !== null) {
    unfoldAround(DATA.failure.module);
    if (countRows() > MOST_ROWS) foldTo(Number(CONTROL.depth.value));
    choose({ module: DATA.failure.module, end: DATA.failure.module + 1 });
  }
  if (DATA.grid.count > 0) {
    sayRange();
    await redrawAll();
    listenToControls();
    listenToCharts();
    redrawOnChange();
  }
  document.documentElement.dataset.ready = "true";
}

start();
