// The table of modules: a filter by text, columns that sort.

const TABLE_COLUMNS = [
  ["name", "module"], ["type", "type"], ["parameters", "parameters"], ["calls", "calls"], ["grad_norm", "grad norm"],
  ["max_output", "max |output|"], ["max_grad", "max |grad|"], ["max_param", "max |param|"], ["nan", "nan"], ["inf", "inf"],
];
const TEXT_COLUMNS = new Set(["name", "type"]);
const TABLE = document.getElementById("table");
let tableRows = [];
let sortedBy = { column: null, descending: false };

function drawTable(onName) {
  TABLE.tHead.rows[0].replaceChildren(...TABLE_COLUMNS.map(([column, label]) => headCell(column, label)));
  tableRows = DATA.modules.name.map((name, module) => {
    const element = document.createElement("tr");
    element.append(...TABLE_COLUMNS.map(([column]) => bodyCell(column, module, onName)));
    return { module, element, text: `${nameOf(module)}\n${DATA.modules.type[module]}`.toLowerCase() };
  });
  TABLE.tBodies[0].replaceChildren(...tableRows.map((row) => row.element));
  filterTable("");
}

function headCell(column, label) {
  const cell = document.createElement("th");
  cell.scope = "col";
  if (!TEXT_COLUMNS.has(column)) cell.className = "number";
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = label;
  button.addEventListener("click", () => sortTable(column, cell));
  cell.append(button);
  return cell;
}

function bodyCell(column, module, onName) {
  const cell = document.createElement("td");
  const value = DATA.modules[column][module];
  if (column === "name") {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = nameOf(module);
    button.addEventListener("click", () => onName(module));
    cell.append(button);
  } else if (column === "type") {
    cell.textContent = value;
  } else {
    cell.className = (column === "nan" || column === "inf") && value > 0 ? "number bad" : "number";
    cell.textContent = shown(value);
  }
  return cell;
}

// Numbers come largest first, names in the order of the alphabet; a third click brings back the order of the model.
function sortTable(column, cell) {
  const text = TEXT_COLUMNS.has(column);
  const second = sortedBy.column === column && sortedBy.descending !== text;
  const third = sortedBy.column === column && sortedBy.descending === text;
  sortedBy = third ? { column: null, descending: false } : { column, descending: second ? text : !text };
  for (const head of TABLE.tHead.rows[0].cells) head.removeAttribute("aria-sort");
  if (!third) cell.setAttribute("aria-sort", sortedBy.descending ? "descending" : "ascending");
  const values = sortedBy.column && DATA.modules[sortedBy.column];
  const sign = sortedBy.descending ? -1 : 1;
  const order = (a, b) => {
    if (!values) return a.module - b.module;
    const [one, other] = [values[a.module], values[b.module]];
    if (one === null || other === null) return (one === null) - (other === null);
    return sign * (one < other ? -1 : one > other ? 1 : 0) || a.module - b.module;
  };
  TABLE.tBodies[0].replaceChildren(...[...tableRows].sort(order).map((row) => row.element));
}

function filterTable(text) {
  const wanted = text.trim().toLowerCase();
  let count = 0;
  for (const row of tableRows) {
    row.element.hidden = !row.text.includes(wanted);
    count += row.element.hidden ? 0 : 1;
  }
  const words = count === tableRows.length ? `${count}` : `${count} of ${tableRows.length}`;
  document.getElementById("filter-count").textContent = `${words} modules`;
}
