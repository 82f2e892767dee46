// The modules as a tree in model order: what is folded, and which rows the heatmap shows.

const TREE = growTree(DATA.modules.parent);
const foldedModules = new Set();
const MOST_ROWS = 2000; // more are drawn only where they are asked for

function growTree(parents) {
  const depth = [];
  const end = parents.map((_, module) => module + 1);
  parents.forEach((parent, module) => depth.push(parent === null ? 0 : depth[parent] + 1));
  for (let module = parents.length - 1; module >= 0; module--) {
    const parent = parents[module];
    if (parent !== null) end[parent] = Math.max(end[parent], end[module]);
  }
  return { parents, depth, end, deepest: depth.reduce((most, one) => Math.max(most, one), 0) };
}

const hasChildren = (module) => TREE.end[module] > module + 1;

function foldTo(depth) {
  foldedModules.clear();
  TREE.depth.forEach((own, module) => {
    if (own >= depth && hasChildren(module)) foldedModules.add(module);
  });
}

function unfoldAround(module) {
  for (let around = TREE.parents[module]; around !== null; around = TREE.parents[around]) foldedModules.delete(around);
}

function toggleFold(module) {
  if (!foldedModules.delete(module)) foldedModules.add(module);
}

// Rows {module, end, folded}: a row stands for the modules from `module` up to, not including, `end`.
function visibleRows(isThere) {
  const rows = [];
  for (let module = 0; module < TREE.end.length; ) {
    const folded = foldedModules.has(module);
    const end = folded ? TREE.end[module] : module + 1;
    if (anyBetween(isThere, module, TREE.end[module])) rows.push({ module, end, folded });
    module = end;
  }
  return rows;
}

function anyBetween(isThere, start, end) {
  for (let module = start; module < end; module++) if (isThere(module)) return true;
  return false;
}

// The greatest depth that a screen has room for; one level is shown however many it has, up to what can be drawn.
function roomyDepth(most) {
  let depth = 0;
  while (depth < TREE.deepest) {
    foldTo(depth + 1);
    if (countRows() > (depth === 0 ? MOST_ROWS : most)) break;
    depth++;
  }
  return depth;
}

const countRows = () => visibleRows(() => true).length;

function nameOf(module) {
  return DATA.modules.name[module] || `(root) ${DATA.modules.type[module]}`.trim();
}
