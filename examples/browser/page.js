// Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
// What the page shows. The model runs in worker.js.

const $ = (id) => document.getElementById(id);
const worker = new Worker("worker.js", { type: "module" });
const measured = {}; // budget -> {count, seconds} of this browser
let about, budgets, profile, writing; // budgets: the keys of about.budgets, ascending

const budget = () => budgets[$("budget").value];
const nameOf = (K) => Object.keys(about.presets).find((name) => about.presets[name] === K) ?? "";
const element = (tag, values = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), values);
  made.append(...children);
  return made;
};
const bytes = (n) => (n < 1e6 ? `${Math.round(n / 1e3)} kB` : `${(n / 1e6).toFixed(1)} MB`);

function status(message, failed = false) {
  $("status").textContent = message;
  $("status").classList.toggle("failed", failed);
}

function showBudget() {
  const K = budget();
  const said = `${nameOf(K)} ${K} of ${budgets.at(-1)} channels`.trim();
  $("size").textContent = said;
  $("budget").setAttribute("aria-valuetext", said);
  $("weights").textContent = bytes(about.budgets[K].weight_bytes);
  $("state").textContent = bytes(about.budgets[K].state_bytes);
  for (const row of $("rows").children) row.setAttribute("aria-current", row.dataset.budget === K);
}

function showTemperature() {
  const heat = Number($("temperature").value);
  $("heat").textContent = heat ? heat.toFixed(1) : "0, always the likeliest byte";
  $("temperature").setAttribute("aria-valuetext", $("heat").textContent);
}

/** A row for each budget: its speed here and on the profile's device, and its quality against the best. */
function showChart() {
  if (!profile) return;
  const { metric, budgets: asked, values, higher_is_better } = profile.quality;
  const [device, { rows }] = Object.entries(profile.devices)[0] ?? ["", { rows: [] }];
  const best = higher_is_better ? Math.max(...values) : Math.min(...values);
  const decoding = rows.filter((row) => row.phase === "decode" && row.batch_size === 1);
  const here = (K) => measured[K] && measured[K].count / measured[K].seconds;
  const there = (K) => decoding.find((row) => String(row.budget) === K)?.tokens_per_second;
  const quality = (K) => values[asked.findIndex((other) => String(other) === K)];
  const loss = (K) => quality(K) && Math.abs(quality(K) / best - 1);
  const whole = (K, speed) => [`${Math.round(speed)}`];
  const both = (K, lost) => [`${quality(K).toFixed(3)} `, element("small", {}, lost ? `${(100 * lost).toFixed(1)}% worse` : "best")];
  const columns = [["here", here, whole], ["there", there, whole], ["loss", loss, both]];
  const most = (...values) => Math.max(...budgets.flatMap((K) => values.map((value) => value(K) ?? 0)));
  const longest = [most(here, there), most(here, there), most(loss)];
  $("device").textContent = `Tokens/s, ${device}`;
  $("metric").textContent = metric.replaceAll("_", " ");
  $("rows").replaceChildren(
    ...budgets.map((K) => {
      const cells = columns.map(([kind, value, text], i) => {
        if (value(K) === undefined) return element("td", {}, "–");
        const bar = element("div", { className: `bar ${kind}` });
        bar.style.width = `${(100 * value(K)) / longest[i]}%`;
        return element("td", {}, ...text(K, value(K)), bar);
      });
      const row = element("tr", {}, element("th", { scope: "row" }, `${K} `, element("small", {}, nameOf(K))), ...cells);
      row.dataset.budget = K;
      return row;
    }),
  );
  $("chart").hidden = false;
  showBudget();
}

function addText({ text, budget: K, count, seconds }) {
  if (!count && !text) return;
  const box = $("text");
  const atEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 8;
  let last = box.lastElementChild;
  if (last?.dataset.budget !== K) {
    last = element("span");
    Object.assign(last.dataset, { budget: K, count: 0 });
    last.style.setProperty("--share", `${(24 * (budgets.indexOf(K) + 1)) / budgets.length}%`);
    box.append(last);
  }
  last.append(text);
  last.dataset.count = Number(last.dataset.count) + count;
  last.title = `${last.dataset.count} tokens by ${K} channels`;
  if (atEnd) box.scrollTop = box.scrollHeight;
  if (!count) return;
  const sum = (measured[K] ??= { count: 0, seconds: 0 });
  sum.count += count;
  sum.seconds += seconds;
  $("speed").textContent = Math.round(sum.count / sum.seconds);
}

const DONE = { stopped: "Stopped.", end: "The text has ended.", longest: "The text is as long as filters reach." };

function running(on) {
  writing = on;
  $("write").disabled = false;
  $("write").textContent = on ? "Stop" : "Write";
}

const heard = {
  async loaded(message) {
    about = message.about;
    budgets = Object.keys(about.budgets).sort((a, b) => about.budgets[a].weight_bytes - about.budgets[b].weight_bytes);
    const read = (response) => (response.ok ? response.json() : null);
    profile = await fetch("budget_profile.json").then(read).catch(() => null); // the page does without
    $("ticks").replaceChildren(...budgets.map((K) => element("span", {}, element("b", {}, K), nameOf(K))));
    const start = about.presets.medium ?? budgets.at(-1);
    Object.assign($("budget"), { max: budgets.length - 1, value: budgets.indexOf(start), disabled: false });
    showBudget();
    showChart();
    worker.postMessage({ budget: budget() });
  },
  opened() {
    if (writing !== undefined) return; // the slider was moved later
    running(false);
    status("Ready.");
  },
  reading() {
    running(true);
    status("Reading …");
  },
  writing: ({ budget: K }) => status(`Writing with ${K} of ${budgets.at(-1)} channels.`),
  text: addText,
  done({ reason }) {
    running(false);
    status(DONE[reason]);
    showChart();
  },
  failed({ message }) {
    if (about) running(false);
    status(message, true);
  },
};

worker.onmessage = ({ data }) => heard[data.kind](data);
worker.onerror = ({ message }) => status(message || "worker.js cannot start: is ort.wasm.bundle.min.mjs beside it?", true);

$("budget").oninput = () => {
  showBudget();
  $("speed").textContent = "–";
  worker.postMessage({ budget: budget() });
};
$("temperature").oninput = () => {
  showTemperature();
  worker.postMessage({ temperature: Number($("temperature").value) });
};
$("form").onsubmit = (event) => {
  event.preventDefault();
  if (writing) return worker.postMessage({ stopped: true });
  const prompt = $("prompt").value;
  $("text").replaceChildren(prompt);
  running(true);
  worker.postMessage({ write: prompt, budget: budget(), temperature: Number($("temperature").value) });
};
showTemperature();
status("Loading the model …");
