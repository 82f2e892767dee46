"use strict";
// Unpacks the planes: base64, inflated, the bytes of equal weight together, back to float32. NaN is "not recorded".

const DATA = JSON.parse(document.getElementById("data").textContent);
const planeCache = new Map();

async function unpackPlane(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const inflated = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(inflated).arrayBuffer());
}

function toFloats(bytes, count) {
  const bits = new Uint32Array(count);
  for (let place = 0; place * count < bytes.length; place++) {
    const shift = 24 - 8 * place;
    for (let cell = 0; cell < count; cell++) bits[cell] |= bytes[place * count + cell] << shift;
  }
  return new Float32Array(bits.buffer);
}

// All planes of a tensor: {norm, min, max, nan, inf}, each module by module, column by column.
async function planesOf(tensor) {
  if (!planeCache.has(tensor)) {
    const { count, packed } = DATA.tensors[tensor];
    const names = Object.keys(packed);
    const loading = Promise.all(names.map((name) => unpackPlane(packed[name])));
    planeCache.set(
      tensor,
      loading.then((all) => {
        const planes = Object.fromEntries(names.map((name, place) => [name, toFloats(all[place], count)]));
        return { ...planes, rows: new Map(DATA.tensors[tensor].modules.map((module, row) => [module, row])) };
      }),
    );
  }
  return planeCache.get(tensor);
}

// The extremes of the modules from `start` up to, not including, `end`, `group` columns taken as one.
function extremes(planes, start, end, group) {
  const count = Math.ceil(DATA.grid.count / group);
  const found = { norm: blank(count), min: blank(count), max: blank(count), nan: blank(count), inf: blank(count) };
  for (let module = start; module < end; module++) {
    const row = planes.rows.get(module);
    if (row === undefined) continue;
    for (let column = 0; column < DATA.grid.count; column++) {
      const cell = row * DATA.grid.count + column;
      const into = Math.floor(column / group);
      found.norm[into] = larger(found.norm[into], planes.norm[cell]);
      found.min[into] = -larger(-found.min[into], -planes.min[cell]);
      found.max[into] = larger(found.max[into], planes.max[cell]);
      found.nan[into] = larger(found.nan[into], planes.nan[cell]);
      found.inf[into] = larger(found.inf[into], planes.inf[cell]);
    }
  }
  return found;
}

function blank(count) {
  return new Float32Array(count).fill(NaN);
}

// The larger one; NaN is nothing.
function larger(one, other) {
  return one >= other || Number.isNaN(other) ? one : other;
}

// What a cell can be coloured by, of what `extremes` found.
const STATISTICS = {
  norm: { label: "norm", of: (found, column) => found.norm[column] },
  magnitude: { label: "max |x|", of: (found, column) => larger(Math.abs(found.min[column]), Math.abs(found.max[column])) },
  min: { label: "min", of: (found, column) => found.min[column] },
  max: { label: "max", of: (found, column) => found.max[column] },
  nan: { label: "nan count", of: (found, column) => found.nan[column] },
  inf: { label: "inf count", of: (found, column) => found.inf[column] },
};

const isBad = (found, column) => found.nan[column] > 0 || found.inf[column] > 0;

// A cell in words.
function cellWords({ norm, min, max, nan, inf }, column) {
  if ([norm, max, nan].every((values) => Number.isNaN(values[column]))) return "not recorded";
  const bad = nan[column] > 0 || inf[column] > 0;
  const counts = bad ? `${shown(nan[column])} nan, ${shown(inf[column])} inf; finite elements: ` : "";
  return `${counts}norm ${shown(norm[column])}, min ${shown(min[column])}, max ${shown(max[column])}`;
}

function shown(value) {
  if (value === null || Number.isNaN(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e-3 && size < 1e5 ? String(Number(value.toPrecision(4))) : value.toExponential(2);
}

// First and last step of a column, or of several taken as one.
function edgesOf(column, group = 1) {
  const first = DATA.grid.first + column * DATA.grid.width * group;
  return [first, Math.min(first + DATA.grid.width * group - 1, DATA.grid.last)];
}

function stepsOf(column, group = 1) {
  const [first, last] = edgesOf(column, group);
  return first === last ? `step ${first}` : `steps ${first} to ${last}`;
}

// Where a column stands on the axis of steps.
function middleOf(column, group = 1) {
  const [first, last] = edgesOf(column, group);
  return (first + last) / 2;
}
