// Who waits on whom, as a drawing: workers at the left, whom they wait for at the right, or all in a circle.

import { find, make, setText } from "./dom.js";
import { percent } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const MAX_NODES = 20;
const WIDTH = 460, MAX_HEIGHT = 390;

function shape(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function drawWaits(waits, tasks) {
  const place = find("#waits .graph");
  const list = waits.map((wait) => `${wait.from} waits ${wait.now_s ? `since ${wait.now_s} s` : percent(wait.share)} for ${wait.to}`);
  const text = JSON.stringify([waits, tasks.map((task) => [task.task, task.state])]);
  if (place.shown === text) return;
  place.shown = text;
  find("#waits details").hidden = !waits.length;
  find("#waits .list").replaceChildren(...list.map((line) => make("li", {}, line)));
  const edges = [];
  const names = new Set();
  for (const wait of waits) {
    const both = new Set([...names, wait.from, wait.to]);
    if (both.size <= MAX_NODES) { both.forEach((name) => names.add(name)); edges.push(wait); }
  }
  setText(find("#waits .note"), edges.length ? `Part of a worker’s time in the last 15 seconds${edges.length < waits.length ? `; the ${edges.length} longest of ${waits.length}` : ""}.` : "");
  if (!edges.length) return place.replaceChildren(make("p", { class: "empty" }, "nobody waits for another task"));
  place.replaceChildren(draw(edges, [...names].sort(byName), new Set(tasks.filter((task) => task.state === "lost").map((task) => task.task))));
}

const byName = (one, other) => one.localeCompare(other, undefined, { numeric: true });

function draw(edges, names, lost) {
  const sides = names.some((name) => name.startsWith("ps:"));
  const places = sides ? inColumns(names) : inCircle(names);
  const height = Math.max(...[...places.values()].map(([, y]) => y)) + 30;
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": "Who waits on whom; the list below says the same" });
  for (const edge of edges.toReversed()) svg.append(...arrow(places.get(edge.from), places.get(edge.to), edge, sides));
  for (const name of names) {
    const [x, y] = places.get(name);
    const right = x > WIDTH / 2;
    const label = shape("text", { x: x + (right ? 14 : -14), y: y + 4, "text-anchor": right ? "start" : "end" }, name.length > 16 ? `${name.slice(0, 15)}…` : name);
    svg.append(shape("g", { class: lost.has(name) ? "lost" : "" }, shape("circle", { cx: x, cy: y, r: 8 }), label));
  }
  return svg;
}

function inColumns(names) {
  const places = new Map();
  const columns = [names.filter((name) => name.startsWith("worker:")), names.filter((name) => !name.startsWith("worker:"))];
  const height = Math.min(MAX_HEIGHT, 46 * Math.max(columns[0].length, columns[1].length)); // higher, the words of all would shrink
  columns.forEach((column, side) => column.forEach((name, index) => {
    places.set(name, [side ? WIDTH - 90 : 90, 10 + (height * (index + 0.5)) / column.length]);
  }));
  return places;
}

function inCircle(names) {
  const radius = Math.min(120, 50 + 8 * names.length);
  return new Map(names.map((name, index) => {
    const angle = (2 * Math.PI * (index + 0.5)) / names.length - Math.PI / 2;
    return [name, [WIDTH / 2 + radius * 1.1 * Math.cos(angle), radius + 26 + radius * Math.sin(angle)]];
  }));
}

const unit = ([x1, y1], [x2, y2]) => { const length = Math.hypot(x2 - x1, y2 - y1) || 1; return [(x2 - x1) / length, (y2 - y1) / length]; };

function arrow(from, to, edge, sides) {
  const [x1, y1] = from, [x2, y2] = to;
  const isBeside = sides && x1 === x2;
  const middle = [(x1 + x2) / 2, (y1 + y2) / 2];
  if (isBeside) middle[0] += (x1 < WIDTH / 2 ? 1 : -1) * (40 + Math.abs(y2 - y1) / 3);
  else if (!sides) { // two that wait for each other are two arrows
    middle[0] -= 0.16 * (y2 - y1);
    middle[1] += 0.16 * (x2 - x1);
  }
  const [sx, sy] = unit(from, middle), [ux, uy] = unit(middle, to);
  const [ex, ey] = [x2 - ux * 10, y2 - uy * 10];
  const width = 1 + 6 * edge.share, size = 6 + width;
  const tip = [[ex, ey], [ex - ux * size - (uy * size) / 2, ey - uy * size + (ux * size) / 2], [ex - ux * size + (uy * size) / 2, ey - uy * size - (ux * size) / 2]];
  const part = sides && !isBeside ? 0.3 : 0.5;
  const [tx, ty] = [0, 1].map((axis) => from[axis] * (1 - part) ** 2 + 2 * middle[axis] * part * (1 - part) + to[axis] * part ** 2);
  const place = isBeside ? { x: tx + (x1 < WIDTH / 2 ? 8 : -8), y: ty + 4, "text-anchor": x1 < WIDTH / 2 ? "start" : "end" } : { x: tx, y: ty - 5 - width / 2, "text-anchor": "middle" };
  return [
    shape("path", { class: "edge", d: `M${x1 + sx * 10} ${y1 + sy * 10} Q${middle} ${ex - ux * size * 0.7} ${ey - uy * size * 0.7}`, "stroke-width": width.toFixed(1) }, shape("title", {}, `${edge.from} waits for ${edge.to}`)),
    shape("polygon", { class: "arrow", points: tip.map((point) => point.map((value) => value.toFixed(1)).join(",")).join(" ") }),
    shape("text", { class: "share", ...place }, edge.now_s ? `${edge.now_s} s` : percent(edge.share)),
  ];
}
