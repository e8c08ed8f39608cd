// Small helpers. Text goes in as text alone: names and messages come from users.

export const find = (selector) => document.querySelector(selector);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Makes the children of a container those of `items`, in that order; what is there already is kept and updated.
export function keyed(container, items, keyOf, create, update) {
  const known = container.known ?? (container.known = new Map());
  const stays = new Set();
  let place = container.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    if (stays.has(key)) continue;
    stays.add(key);
    let element = known.get(key);
    if (!element) known.set(key, (element = create(item)));
    if (element === place) place = place.nextElementSibling;
    else container.insertBefore(element, place);
    update(element, item);
  }
  for (const [key, element] of known) {
    if (!stays.has(key)) { element.remove(); known.delete(key); }
  }
}

// columns: [heading, cell(item) -> text or element, class]
export function table(container, columns, items, keyOf) {
  if (!items.length) {
    if (!container.querySelector(".empty")) container.replaceChildren(make("p", { class: "empty" }, "none"));
    return;
  }
  let body = container.querySelector("tbody");
  if (!body) {
    const heads = columns.map(([heading, , kind]) => make("th", { scope: "col", class: kind ?? "" }, heading));
    body = make("tbody");
    container.replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, ...heads)), body));
  }
  const create = () => make("tr", {}, ...columns.map(([, , kind]) => make("td", { class: kind ?? "" })));
  keyed(body, items, keyOf, create, (row, item) => columns.forEach(([, cell, kind], index) => {
    const found = cell(item, row.children[index]);
    if (typeof found === "string") setText(row.children[index], found);
    else if (found) row.children[index].className = `${kind ?? ""} ${found.class}`, setText(row.children[index], found.text);
  }));
}

// Parts of a bar: [class, share of the bar's width, title]
export function bar(element, parts) {
  keyed(element, parts, (part) => part[0], (part) => make("i", { class: part[0] }), (segment, part) => {
    segment.style.width = `${(100 * part[1]).toFixed(2)}%`;
    if (segment.title !== part[2]) segment.title = part[2];
  });
}
