// What the three charts have in common: colours of the theme, margins, one axis of steps for all of them.

const HAS_TENSORS = Object.keys(DATA.tensors).length > 0;
const CHARTS = (HAS_TENSORS ? ["course", "heatmap", "lines"] : ["course"]).map((id) => document.getElementById(id));
const CONFIG = { displayModeBar: false, responsive: false, doubleClick: "reset" };
const NARROW = 640;
const RIGHT_MARGIN = 18; // room for the scroll bar of a tall heatmap
let shownSteps = null; // [first, last] on the axis, or null for all

function theme() {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`).trim();
  const several = (name, count) => Array.from({ length: count }, (_, place) => color(`${name}-${place}`));
  return {
    text: color("text"), muted: color("muted"), rule: color("rule"), ground: color("ground"), loud: color("loud"),
    lines: several("line", 6), ramp: several("ramp", 5),
  };
}

const isNarrow = () => window.innerWidth < NARROW;
const leftMargin = () => (isNarrow() ? 112 : 250);
const chartWidth = () => Math.max(200, document.getElementById("charts").clientWidth);
const plotWidth = () => chartWidth() - leftMargin() - RIGHT_MARGIN;
const allSteps = () => [DATA.grid.first - 0.5, DATA.grid.last + 0.5];
const rangeOfSteps = () => shownSteps || allSteps();

function baseLayout(colors, height) {
  return {
    height, width: chartWidth(), margin: { l: leftMargin(), r: RIGHT_MARGIN, t: 6, b: 34 }, showlegend: false,
    paper_bgcolor: colors.ground, plot_bgcolor: colors.ground, hovermode: "closest",
    font: { family: "system-ui, 'DejaVu Sans', sans-serif", size: 12, color: colors.text },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", shapes: [], annotations: [],
    xaxis: {
      range: rangeOfSteps(), title: { text: "step", standoff: 4 }, gridcolor: colors.rule, zeroline: false, color: colors.muted,
      tickformat: ",d", nticks: isNarrow() ? 4 : 10, minallowed: allSteps()[0], maxallowed: allSteps()[1],
    },
  };
}

function valueAxis(colors, domain, type, values) {
  const axis = {
    domain, type, fixedrange: true, gridcolor: colors.rule, zeroline: false, color: colors.muted, nticks: 4,
    tickformat: ".3~g", ticklabeloverflow: "hide past domain",
  };
  const [low, high] = bounds(values);
  if (low === high) axis.range = around(low, type);
  else if (type === "log" && high > 30 * low) axis.dtick = Math.max(1, Math.round(Math.log10(high / low) / 3));
  return axis;
}

function bounds(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value === null || Number.isNaN(value)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return [low, high];
}

// A range for a value that never changes.
function around(value, type) {
  if (type === "log") return [Math.log10(value) - 0.3, Math.log10(value) + 0.3];
  const room = Math.abs(value) / 2 || 1;
  return [value - room, value + room];
}

// Domains from top to bottom for panels of these heights.
function panels(heights) {
  const all = heights.reduce((sum, height) => sum + height, 0);
  let top = 1;
  return heights.map((height) => {
    const bottom = Math.max(0, top - height / all);
    const domain = [bottom, top - (top === 1 ? 0 : 12 / all)];
    top = bottom;
    return domain;
  });
}

// The title of a panel: left of it, or where there is no room for that, in its corner.
function panelTitle(text, axis, colors) {
  const common = { text, xref: "paper", x: 0, yref: `${axis} domain`, showarrow: false, font: { color: colors.text, size: 12 } };
  if (!isNarrow()) return { ...common, xanchor: "right", xshift: -58, y: 0.5, yanchor: "middle", align: "right" };
  return { ...common, text: text.replace("<br>", " "), xanchor: "left", y: 1, yanchor: "top", bgcolor: colors.ground, opacity: 0.85 };
}

// A strip in the loud colour at the foot of a panel, under each column that holds something not finite.
function strips(columns, axis, colors) {
  const shapes = [];
  for (let place = 0; place < columns.length; ) {
    let last = place;
    while (last + 1 < columns.length && columns[last + 1] === columns[last] + 1) last++;
    const edge = DATA.grid.first - 0.5;
    shapes.push({
      type: "rect", xref: "x", yref: `${axis} domain`, y0: 0, y1: 0.09, fillcolor: colors.loud,
      x0: edge + columns[place] * DATA.grid.width, x1: edge + (columns[last] + 1) * DATA.grid.width,
      line: { width: 1.5, color: colors.loud },
    });
    place = last + 1;
  }
  return shapes;
}

// A dotted line at the step of the first non-finite value.
function failureLine(colors) {
  if (!DATA.failure) return [];
  const step = DATA.failure.step;
  return [{
    type: "line", xref: "x", yref: "paper", x0: step, x1: step, y0: 0, y1: 1, line: { color: colors.text, width: 1, dash: "dot" },
  }];
}

// Whether values call for a logarithmic axis.
function isSpread(values) {
  const [low, high] = bounds(values);
  return low > 0 && high > 30 * low;
}

// Plotly takes what looks like markup in a text for markup.
function plain(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/\s+/g, " ");
}

function watchSteps(onChange) {
  for (const chart of CHARTS) {
    chart.on("plotly_relayout", (change) => {
      if (change["xaxis.range[0]"] !== undefined) onChange([change["xaxis.range[0]"], change["xaxis.range[1]"]]);
      else if (change["xaxis.range"]) onChange(change["xaxis.range"]);
      else if (change["xaxis.autorange"]) onChange(null);
    });
    chart.on("plotly_doubleclick", () => onChange(null));
  }
}

const TIP = document.getElementById("tip");

function showTip(event, text) {
  TIP.textContent = text;
  TIP.hidden = false;
  const { clientX: x = 0, clientY: y = 0 } = event || {};
  TIP.style.left = `${Math.max(4, Math.min(x + 14, window.innerWidth - TIP.offsetWidth - 8))}px`;
  TIP.style.top = `${y + 18 + TIP.offsetHeight > window.innerHeight ? Math.max(4, y - TIP.offsetHeight - 10) : y + 18}px`;
}

function hideTip() {
  TIP.hidden = true;
}
