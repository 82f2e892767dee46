// The heatmap: modules over steps, colours on a logarithmic scale, what is not finite in a colour of its own.

const HEATMAP = document.getElementById("heatmap");
const LOUD_FROM = 0.985; // the finite values take the colour scale up to here
const DECADES = 12; // what is smaller than the largest by more than this has the lowest colour
const MARK_SIZE = 5; // pixels
const MOST_MARKS = 2000;
let heatmapRows = [];
let heatmapFound = [];
let heatmapGroup = 1;

// So many columns are drawn as one that each is a pixel wide: a narrower one could be lost.
function columnGroup() {
  const [first, last] = rangeOfSteps();
  const visible = (last - first) / DATA.grid.width;
  return Math.max(1, Math.ceil(visible / plotWidth()));
}

async function drawHeatmap(tensor, statistic) {
  const planes = await planesOf(tensor);
  const colors = theme();
  heatmapGroup = columnGroup();
  heatmapRows = visibleRows((module) => planes.rows.has(module));
  heatmapFound = heatmapRows.map((row) => extremes(planes, row.module, row.end, heatmapGroup));
  const { z, low, high } = colored(heatmapFound, STATISTICS[statistic].of);
  sayScale(tensor, statistic, low, high);
  const count = heatmapRows.length;
  const rowHeight = count <= 45 ? 18 : count <= 120 ? 11 : 4;
  const layout = baseLayout(colors, count * rowHeight + 40);
  layout.yaxis = { ...labelAxis(rowHeight), color: colors.text, fixedrange: true, showgrid: false, zeroline: false };
  layout.xaxis.showgrid = false;
  const dx = DATA.grid.width * heatmapGroup;
  const trace = {
    type: "heatmap", z, x0: DATA.grid.first + (dx - 1) / 2, dx, y0: 0, dy: 1,
    zmin: 0, zmax: 1, zsmooth: false, showscale: false, hoverinfo: "none", hoverongaps: false, colorscale: colorScale(colors),
    xgap: 0, ygap: rowHeight > 11 ? 1 : 0,
  };
  return Plotly.react(HEATMAP, [trace, ...badMarks(colors, rowHeight)], layout, CONFIG);
}

// Where columns are narrow, a mark on the first column of each stretch that is not finite: else it is hard to see.
function badMarks(colors, rowHeight) {
  const [first, last] = rangeOfSteps();
  const width = (plotWidth() * DATA.grid.width * heatmapGroup) / (last - first);
  const [x, y] = [[], []];
  heatmapFound.forEach((found, row) => {
    for (let column = 0; column < found.nan.length; column++) {
      if (!isBad(found, column) || (column > 0 && isBad(found, column - 1))) continue;
      x.push(middleOf(column, heatmapGroup));
      y.push(row);
    }
  });
  if (width >= MARK_SIZE || x.length > MOST_MARKS) return [];
  const marker = { symbol: "square", size: Math.min(MARK_SIZE, rowHeight), color: colors.loud };
  return [{ x, y, type: "scatter", mode: "markers", marker, hoverinfo: "skip", cliponaxis: false }];
}

function colorScale(colors) {
  const last = colors.ramp.length - 1;
  const finite = colors.ramp.map((color, place) => [(place / last) * LOUD_FROM, color]);
  return [...finite, [LOUD_FROM, colors.loud], [1, colors.loud]];
}

// Rows of numbers from 0 to 1 for the colour scale, and the smallest and largest size that it spans.
function colored(found, statistic) {
  let [low, high] = [Infinity, 0];
  const sizes = found.map((row) => row.norm.map((_, column) => Math.abs(statistic(row, column))));
  sizes.forEach((row, number) => row.forEach((size, column) => {
    if (!(size > 0) || isBad(found[number], column)) return;
    low = Math.min(low, size);
    high = Math.max(high, size);
  }));
  low = Math.max(low, high / 10 ** DECADES);
  const span = Math.log10(high / low);
  const place = (size) => {
    if (size === 0 || !(span > 0)) return size === 0 ? 0 : LOUD_FROM / 2;
    return (Math.log10(Math.max(size, low) / low) / span) * (LOUD_FROM - 0.01);
  };
  const color = (row, column, size) => (isBad(row, column) ? 1 : Number.isNaN(size) ? null : place(size));
  const z = found.map((row, number) => Array.from(sizes[number], (size, column) => color(row, column, size)));
  return { z, low, high };
}

function sayScale(tensor, statistic, low, high) {
  const signed = statistic === "min" || statistic === "max";
  const label = signed ? `|${STATISTICS[statistic].label}|` : STATISTICS[statistic].label;
  const known = high > 0;
  document.getElementById("scale-name").textContent = `${tensor}: ${label}`;
  document.getElementById("scale-low").textContent = known ? shown(low) : "0";
  document.getElementById("scale-high").textContent = known ? shown(high) : "";
}

function labelAxis(rowHeight) {
  const every = Math.ceil(rowHeight < 11 ? 16 / rowHeight : 1);
  const longest = isNarrow() ? 17 : 40;
  const labelled = heatmapRows.map((_, row) => row).filter((row) => row % every === 0);
  return {
    range: [heatmapRows.length - 0.5, -0.5], tickvals: labelled, ticktext: labelled.map((row) => plain(rowLabel(heatmapRows[row], longest))),
    tickfont: { size: rowHeight > 11 ? 11 : 9, family: "ui-monospace, 'DejaVu Sans Mono', monospace" }, ticks: "",
  };
}

function rowLabel(row, longest) {
  const mark = row.folded ? "▸ " : hasChildren(row.module) ? "▾ " : "";
  const letters = Array.from(nameOf(row.module));
  const name = letters.length > longest ? `…${letters.slice(1 - longest).join("")}` : letters.join("");
  return mark + name;
}

function heatmapTip(point) {
  const [row, column] = point.pointIndex;
  const { module, end, folded } = heatmapRows[row];
  const inside = folded ? ` and ${end - module - 1} in it` : "";
  return [nameOf(module) + inside, stepsOf(column, heatmapGroup), cellWords(heatmapFound[row], column)].join("\n");
}
