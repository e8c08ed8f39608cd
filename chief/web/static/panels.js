// What is known now, panel by panel.

import { bar, find, keyed, make, setText, table } from "./dom.js";
import { count, loss, measure, percent, rate, seconds } from "./words.js";

const PHASES = ["data_wait_s", "lease_wait_s", "rows_wait_s", "forward_s", "backward_s", "optimizer_s", "script_s", "push_s", "wait_s", "gate_wait_s", "meeting_s", "save_s"];
const SERVED = ["receive_s", "queue_s", "held_s", "merge_s", "apply_s", "reply_s"];

export function showJob(look) {
  const job = look.job;
  const chip = find("#state");
  const [text, kind] = job.stop_reason ? ["ending", "warn"] : job.ready ? ["running", "good"] : ["waiting for the cluster", "warn"];
  setText(chip, text);
  chip.className = `chip ${kind}`;
  const units = job.units_planned ? [`units ${job.units_accepted}/${job.units_planned}`] : [];
  const facts = [`epoch ${job.epoch}`, ...units, `lead ${job.lead || "–"}`, `loss ${loss(job.loss)}`];
  if (job.updates_lost) facts.push(`updates lost ${job.updates_lost}`);
  if (!job.ready && job.waiting_for.length) facts.unshift(`waiting for ${job.waiting_for.join(", ")}`);
  if (job.stop_reason) facts.unshift(job.stop_reason);
  setText(find("#facts"), facts.join(" · "));
  const progress = find("#progress");
  progress.setAttribute("aria-valuemax", job.units_planned || 1);
  progress.setAttribute("aria-valuenow", job.units_accepted);
  progress.firstElementChild.style.width = `${(100 * job.units_accepted) / (job.units_planned || 1)}%`;
  document.title = `${text} · Stratagem`;
}

export function showVerdict(verdict) {
  const section = find("#verdict");
  section.className = verdict.cause === "nothing" ? "good" : verdict.cause === "unknown" ? "" : "bad";
  setText(section.querySelector(".sentence"), verdict.sentence);
  const advice = verdict.advice ? `What to do: ${verdict.advice}` : "";
  setText(section.querySelector(".advice"), advice);
  const evidence = [...verdict.evidence, ...verdict.also.map((line) => `also: ${line}`), `how sure: ${verdict.sure}`];
  const list = section.querySelector("ul");
  keyed(list, evidence.map((line, index) => [index, line]), (one) => one[0], () => make("li"), (item, one) => setText(item, one[1]));
}

function legend(place, names) {
  keyed(place, names, (name) => name, (name) => make("li", {}, make("i", { class: name }), measure(name)), () => {});
}

export function showSteps(workers) {
  const place = find("#steps .waterfall");
  legend(find("#steps .legend"), PHASES.filter((name) => workers.some((worker) => name in worker.phases)));
  const whole = (worker) => Object.values(worker.phases).reduce((sum, value) => sum + value, 0);
  const longest = Math.max(...workers.map(whole), 1e-9);
  const cells = workers.flatMap((worker) => ["name", "bar", "sum"].map((kind) => ({ worker, kind })));
  const create = (cell) => (cell.kind === "bar" ? make("div", { class: "bar" }) : make(cell.kind === "name" ? "span" : "b"));
  keyed(place, cells, (cell) => `${cell.kind} ${cell.worker.task}`, create, (element, { worker, kind }) => {
    if (kind === "name") setText(element, worker.task);
    else if (kind === "sum") setText(element, seconds(whole(worker)));
    else {
      const shown = PHASES.filter((name) => name in worker.phases);
      bar(element, shown.map((name) => [name, worker.phases[name] / longest, `${measure(name)}: ${seconds(worker.phases[name])}`]));
    }
  });
  find("#steps .note").hidden = !workers.length;
  if (!workers.length && !place.querySelector(".empty")) place.append(make("p", { class: "empty" }, "no step has ended yet"));
  else if (workers.length) place.querySelector(".empty")?.remove();
}

export function showServers(servers, tasks) {
  find("#servers").hidden = !tasks.some((task) => task.task.startsWith("ps:"));
  legend(find("#servers .legend"), SERVED.filter((name) => servers.some((ps) => ps.shares[name] > 0)));
  const bytes = Math.max(...servers.map((ps) => ps.received_bytes_per_s), 1);
  const busiest = Math.max(1, ...servers.map((ps) => SERVED.reduce((sum, name) => sum + ps.shares[name], 0)));
  const inBar = (element, parts) => bar(element.firstElementChild ?? element.appendChild(make("div", { class: "bar thin" })), parts);
  table(find("#servers .table"), [
    ["ps", (ps) => ps.task],
    ["updates/s", (ps) => count(ps.updates_per_s), "number"],
    ["receives", (ps) => rate(ps.received_bytes_per_s), "number"],
    ["", (ps, cell) => void inBar(cell, [["receive_s", ps.received_bytes_per_s / bytes, rate(ps.received_bytes_per_s)]])],
    ["serves", (ps, cell) => void inBar(cell, SERVED.map((name) => [name, ps.shares[name] / busiest, `${measure(name)} ${percent(ps.shares[name])}`]))],
    ["staleness", (ps) => staleness(ps.staleness), "words"],
    ["hottest groups", (ps) => ps.hot.filter(([share]) => share >= 0.005).slice(0, 2).map(([share, name]) => `${name} ${percent(share)}`).join(", ") || "–"],
    ["hottest rows", (ps) => ps.rows.slice(0, 3).map(([share, name]) => `${name} ${percent(share)}`).join(", ") || "–", "words"],
  ], servers, (ps) => ps.task);
}

const unbroken = (text) => text.replaceAll(" ", "\u00a0").replace("–", "–\u2060");

function staleness(ranges) {
  const all = Object.values(ranges).reduce((sum, value) => sum + value, 0);
  const parts = Object.entries(ranges).filter(([, value]) => value).map(([range, value]) => unbroken(`${range}: ${percent(value / all)}`));
  return parts.join(", ") || "–";
}

export function showLanes(lanes) {
  table(find("#lanes .table"), [
    ["task", (lane) => lane.task],
    ["peer", (lane) => lane.peer],
    ["lane", (lane) => lane.kind],
    ["sends", (lane) => rate(lane.sent_per_s), "number"],
    ["receives", (lane) => rate(lane.received_per_s), "number"],
    ["round trip", (lane) => seconds(lane.round_trip_s), "number"],
    ["why", (lane) => lane.why || "–", "words"],
  ], lanes, (lane) => `${lane.task} ${lane.peer} ${lane.kind}`);
}

export function showTasks(tasks) {
  table(find("#tasks .table"), [
    ["task", (task) => task.task],
    ["state", (task) => ({ text: task.state_words, class: task.state })],
    ["incarnation", (task) => String(task.incarnation || "–"), "number"],
    ["step", (task) => String(task.step), "number"],
    ["version", (task) => (task.task.startsWith("ps:") ? `${task.store_epoch}.${task.step}` : "–"), "number"],
    ["epoch", (task) => (task.task.startsWith("worker:") ? String(task.epoch) : "–"), "number"],
    ["loss", (task) => loss(task.loss), "number"],
    ["exposed", (task) => (task.step_s > 0 ? percent(task.exposed_s / task.step_s) : "–"), "number"],
    ["units", (task) => (task.task.startsWith("worker:") ? String(task.units_held) : "–"), "number"],
    ["heard of", (task) => (task.task === "chief:0" || !task.incarnation ? "–" : `${task.heartbeat_age_s.toFixed(1)} s ago`), "number"],
    ["waiting on", (task) => (task.waiting_on ? `${task.waiting_on} (${task.waiting_s.toFixed(1)} s)` : "–"), "words"],
    ["backup", (task) => task.backup || "–"],
    ["address", (task) => task.address || "–"],
  ], tasks, (task) => task.task);
}

export function showCheckpoints(job, checkpoints) {
  const newest = job.checkpoint ? `Newest checkpoint ${job.checkpoint}.` : "No checkpoint yet.";
  setText(find("#events .note"), checkpoints.held_share > 0.005 ? `${newest} Commits were held for checkpoints ${percent(checkpoints.held_share)} of the time.` : newest);
}
