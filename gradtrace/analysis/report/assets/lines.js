// The lines of chosen modules: norm above, min and max below, of the tensor that the heatmap shows.

const LINES = document.getElementById("lines");
const MOST_CHOSEN = 6;
const LINES_HEIGHT = 180;
let chosenRows = []; // {module, end, color}

function choose(row) {
  const same = (one) => one.module === row.module && one.end === row.end;
  if (chosenRows.some(same)) return;
  const used = chosenRows.slice(1 - MOST_CHOSEN);
  const color = Array.from({ length: MOST_CHOSEN }, (_, place) => place).find((place) => used.every((one) => one.color !== place));
  chosenRows = [...used, { module: row.module, end: row.end, color }];
}

function chosenName(row) {
  return nameOf(row.module) + (row.end > row.module + 1 ? " and all in it" : "");
}

async function drawLines(tensor, logarithmic) {
  const planes = await planesOf(tensor);
  const colors = theme();
  const none = chosenRows.length === 0;
  document.getElementById("no-lines").hidden = !none;
  document.getElementById("clear").hidden = none;
  LINES.hidden = none;
  const layout = baseLayout(colors, none ? 60 : 44 + 2 * LINES_HEIGHT);
  const traces = [];
  const bad = new Set();
  for (const row of chosenRows) addLines(row, extremes(planes, row.module, row.end, 1), { traces, colors, bad, logarithmic });
  const axes = panels([LINES_HEIGHT, LINES_HEIGHT]);
  const valuesOn = (axis) => traces.filter((trace) => trace.yaxis === axis).flatMap((trace) => trace.y);
  layout.yaxis = valueAxis(colors, axes[0], logarithmic ? "log" : "linear", valuesOn("y"));
  layout.yaxis2 = valueAxis(colors, axes[1], logarithmic ? "log" : "linear", valuesOn("y2"));
  layout.annotations.push(panelTitle(`${tensor}<br>norm`, "y", colors));
  layout.annotations.push(panelTitle(logarithmic ? `${tensor}<br>|max|, |min| ···` : `${tensor}<br>max, min ···`, "y2", colors));
  const columns = [...bad].sort((a, b) => a - b);
  layout.shapes.push(...strips(columns, "y", colors), ...strips(columns, "y2", colors), ...failureLine(colors));
  layout.xaxis.anchor = "free";
  layout.xaxis.position = 0;
  return Plotly.react(LINES, traces, layout, CONFIG);
}

function addLines(row, found, { traces, colors, bad, logarithmic }) {
  const color = colors.lines[row.color];
  const x = Array.from(found.norm, (_, column) => middleOf(column));
  const drawable = (values) => Array.from(values, (value) => {
    const size = logarithmic ? Math.abs(value) : value;
    return Number.isNaN(size) || (logarithmic && size === 0) ? null : size;
  });
  const lone = found.norm.filter((value) => !Number.isNaN(value)).length < 80;
  const common = { x, mode: lone ? "lines+markers" : "lines", marker: { size: 4 }, hoverinfo: "none", name: plain(chosenName(row)), connectgaps: false };
  traces.push({ ...common, y: drawable(found.norm), yaxis: "y", line: { color, width: 1.5 }, meta: { row, found } });
  traces.push({ ...common, y: drawable(found.max), yaxis: "y2", line: { color, width: 1.5 }, meta: { row, found } });
  traces.push({ ...common, y: drawable(found.min), yaxis: "y2", line: { color, width: 1.5, dash: "dot" }, meta: { row, found } });
  found.norm.forEach((_, column) => {
    if (isBad(found, column)) bad.add(column);
  });
}

function lineTip(point) {
  const { row, found } = point.data.meta;
  return [chosenName(row), stepsOf(point.pointIndex), cellWords(found, point.pointIndex)].join("\n");
}

// A button for each chosen module, which lets go of it.
function drawChips(onChange) {
  const colors = theme();
  const place = document.getElementById("chosen");
  place.replaceChildren(...chosenRows.map((row) => {
    const chip = document.createElement("button");
    chip.type = "button";
    chip.className = "chip";
    chip.title = "Remove";
    const dash = document.createElement("span");
    dash.className = "dash";
    dash.style.background = colors.lines[row.color];
    chip.append(dash, document.createTextNode(`${chosenName(row)} ×`));
    chip.addEventListener("click", () => {
      chosenRows = chosenRows.filter((one) => one !== row);
      onChange();
    });
    return chip;
  }));
}
