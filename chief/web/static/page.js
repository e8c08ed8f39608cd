// The page: one stream from the chief, which it comes back to when it breaks off.

import { Curves } from "./curves.js";
import { find, make } from "./dom.js";
import { drawWaits } from "./graph.js";
import { showCheckpoints, showJob, showLanes, showServers, showSteps, showTasks, showVerdict } from "./panels.js";
import { clock } from "./words.js";

const RETRY_MS = 2000;
const MAX_KEPT = 300;
const curves = new Curves();
let stream = null;
let latest = null;

function show() {
  if (!latest) return;
  showJob(latest);
  showVerdict(latest.verdict);
  curves.draw();
  showSteps(latest.workers);
  drawWaits(latest.waits, latest.tasks);
  showServers(latest.ps, latest.tasks);
  showLanes(latest.lanes);
  showTasks(latest.tasks);
  showCheckpoints(latest.job, latest.checkpoints);
  document.body.dataset.looks = Number(document.body.dataset.looks ?? 0) + 1;
}

function away() {
  document.body.classList.add("away");
  const chip = find("#state");
  chip.textContent = latest?.job.stop_reason ? "the job is over" : "the chief does not answer";
  chip.className = latest?.job.stop_reason ? "chip" : "chip bad";
  document.title = `${chip.textContent} · Stratagem`;
}

// A browser has six connections to a server, for all its tabs: those that nobody sees have none.
function connect() {
  if (stream || document.hidden) return;
  stream = new EventSource("api/live");
  stream.addEventListener("past", (message) => {
    const past = JSON.parse(message.data);
    curves.setPast(past.columns, past.points);
  });
  stream.addEventListener("look", (message) => {
    latest = JSON.parse(message.data);
    document.body.classList.remove("away");
    curves.add(latest.point);
    show();
  });
  stream.addEventListener("news", (message) => {
    const news = JSON.parse(message.data);
    news.happenings.forEach(addHappening);
    news.lines.forEach(addLine);
  });
  stream.onerror = () => {
    away();
    disconnect(); // a browser gives up by itself after some answers
    setTimeout(connect, RETRY_MS);
  };
}

function disconnect() {
  stream?.close();
  stream = null;
}

// After a stream broke off the chief tells everything again: what is here already is not shown twice.
function addOnce(list, key, element) {
  const known = list.keys ?? (list.keys = new Set());
  if (known.has(key)) return;
  known.add(key);
  element.dataset.key = key;
  list.prepend(element);
  while (list.children.length > MAX_KEPT) {
    known.delete(list.lastElementChild.dataset.key);
    list.lastElementChild.remove();
  }
}

function addHappening(one) {
  addOnce(find("#events .events"), `${one.at} ${one.number}`, make("li", { class: one.kind }, make("time", {}, clock(one.at)), one.text));
}

function addLine(line) {
  const select = find("#log select");
  if (![...select.options].some((option) => option.value === line.task)) select.append(new Option(line.task, line.task));
  const item = make("li", { class: line.level }, make("time", {}, clock(line.at)), make("em", {}, line.task), line.text);
  item.dataset.task = line.task;
  addOnce(find("#log .lines"), `${line.at} ${line.number}`, item);
  filter(item);
}

function filter(item) {
  const task = find("#log select").value;
  const text = find("#log input").value.toLowerCase();
  item.hidden = (task && item.dataset.task !== task) || !item.textContent.toLowerCase().includes(text);
}

const filterAll = () => [...find("#log .lines").children].forEach(filter);

const stored = () => { try { return localStorage.getItem("theme"); } catch { return null; } };
const preferred = matchMedia("(prefers-color-scheme: dark)");

function applyTheme(theme) {
  document.documentElement.dataset.theme = theme;
  find("#theme").textContent = theme === "dark" ? "light" : "dark";
  curves.redraw();
}

find("#theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("theme", theme); } catch { /* it holds for this page alone */ }
  applyTheme(theme);
});
preferred.addEventListener("change", () => stored() || applyTheme(preferred.matches ? "dark" : "light"));
document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));
find("#log select").addEventListener("change", filterAll);
find("#log input").addEventListener("input", filterAll);
applyTheme(stored() ?? (preferred.matches ? "dark" : "light"));
connect();
