// The chart on top: loss, gradient norm, learning rate and loss scale, with the events of the run.

const COURSE = document.getElementById("course");
const COURSE_NAMES = { loss: "loss", grad_norm: "grad norm", lr: "learning rate", loss_scale: "loss scale" };
const EVENT_SYMBOLS = { incident: "diamond", skip: "triangle-down", switch: "square", stop: "hexagon", lost: "circle-open" };
const PANEL_HEIGHT = 84;
const EVENT_HEIGHT = 22;
const LABEL_HEIGHT = 20;

function drawCourse() {
  const colors = theme();
  const names = Object.keys(DATA.courses);
  const kinds = Object.keys(EVENT_SYMBOLS).filter((kind) => DATA.events.some((event) => event.name === kind));
  const heights = [...names.map(() => PANEL_HEIGHT), ...(kinds.length ? [12 + EVENT_HEIGHT * kinds.length] : [])];
  COURSE.hidden = heights.length === 0;
  const layout = baseLayout(colors, LABEL_HEIGHT + 38 + heights.reduce((sum, height) => sum + height, 0));
  const traces = [];
  const domains = panels(heights);
  names.forEach((name, place) => addCourse(name, place, domains[place], { colors, layout, traces }));
  if (kinds.length) addEvents(kinds, names.length, domains[names.length], { colors, layout, traces });
  layout.xaxis.anchor = "free";
  layout.xaxis.position = 0;
  layout.margin.t = LABEL_HEIGHT;
  layout.shapes.push(...failureLine(colors));
  if (DATA.failure) layout.annotations.push(failureLabel(colors));
  return Plotly.react(COURSE, traces, layout, CONFIG);
}

function failureLabel(colors) {
  const step = DATA.failure.step;
  const right = step < (DATA.grid.first + DATA.grid.last) / 2;
  return {
    text: "first non-finite", x: step, y: 1, yref: "paper", yanchor: "bottom", xanchor: right ? "left" : "right", showarrow: false,
    font: { size: 11, color: colors.muted },
  };
}

function addCourse(name, place, domain, { colors, layout, traces }) {
  const course = DATA.courses[name];
  const axis = place === 0 ? "y" : `y${place + 1}`;
  const values = [...course.low, ...course.high];
  const type = isSpread(values) ? "log" : "linear";
  layout[`yaxis${place === 0 ? "" : place + 1}`] = valueAxis(colors, domain, type, values);
  layout.annotations.push(panelTitle(COURSE_NAMES[name], axis, colors));
  const x = course.last.map((_, column) => middleOf(column));
  const common = { x, yaxis: axis, mode: "lines", hoverinfo: "none", connectgaps: false, name };
  if (DATA.grid.width > 1) {
    traces.push({ ...common, y: course.low, line: { width: 0 } });
    traces.push({ ...common, y: course.high, line: { width: 0 }, fill: "tonexty", fillcolor: `${colors.lines[0]}44` });
  }
  const lone = course.last.filter((value) => value !== null).length < 80;
  traces.push({ ...common, y: course.last, mode: lone ? "lines+markers" : "lines", marker: { size: 4 }, line: { color: colors.lines[0], width: 1.5 } });
  layout.shapes.push(...strips(Object.keys(course.bad).map(Number), axis, colors));
}

function addEvents(kinds, place, domain, { colors, layout, traces }) {
  const axis = place === 0 ? "y" : `y${place + 1}`;
  layout[`yaxis${place === 0 ? "" : place + 1}`] = {
    domain, fixedrange: true, range: [kinds.length - 0.5, -0.5], tickvals: kinds.map((_, row) => row), ticktext: kinds,
    gridcolor: colors.rule, zeroline: false, color: colors.muted,
  };
  layout.annotations.push(panelTitle("events", axis, colors));
  kinds.forEach((kind, row) => {
    const events = DATA.events.filter((event) => event.name === kind);
    traces.push({
      x: events.map((event) => middleOf(event.column)), y: events.map(() => row), yaxis: axis, mode: "markers", hoverinfo: "none",
      customdata: events, marker: { symbol: EVENT_SYMBOLS[kind], size: 9, color: colors.text },
    });
  });
}

function courseTip(point) {
  const event = point.customdata;
  if (event) return eventWords(event);
  const column = point.pointIndex;
  const lines = Object.entries(DATA.courses).map(([name, course]) => `${COURSE_NAMES[name]}: ${courseWords(course, column)}`);
  return [stepsOf(column), ...lines].join("\n");
}

function courseWords(course, column) {
  const [low, high, last] = [course.low[column], course.high[column], course.last[column]];
  const range = low === high ? shown(last) : `${shown(low)} to ${shown(high)}, last ${shown(last)}`;
  const bad = course.bad[column];
  if (!bad) return range;
  const finite = last === null ? "" : `; else ${range}`;
  return `${bad[0] === 1 ? "" : `${bad[0]} values `}not finite, first at step ${bad[1]}${finite}`;
}

function eventWords(event) {
  const when = event.first_step === event.last_step ? `step ${event.first_step}` : `steps ${event.first_step} to ${event.last_step}`;
  const times = event.count > 1 ? `${event.count} times, ` : "";
  const whose = DATA.ranks > 1 ? `, rank ${event.rank}` : "";
  return [`${event.name}: ${times}${when}${whose}`, event.detail].filter(Boolean).join("\n");
}
