// Draws the report from the JSON in #data. All text goes in as text (textContent), never as HTML.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);

const SVG = document.getElementById("svg").namespaceURI;  // so that no address stands in the file
const W = 380, H = 190, LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 22;

function make(parent, tag, attributes = {}, text) {
  const svg = parent.namespaceURI.endsWith("svg") || tag === "svg";
  const element = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

function show(value) {
  if (typeof value !== "number") return String(value);
  return value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5) ? (+value.toPrecision(3)).toExponential() : String(+value.toPrecision(4));
}

function trailingMean(values, window) {
  return values.map((_, end) => {
    const part = values.slice(Math.max(0, end - window + 1), end + 1).filter(Number.isFinite);
    return part.length ? part.reduce((a, b) => a + b, 0) / part.length : NaN;
  });
}

function linearTicks(low, high) {
  const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const ticks = [];
  for (let k = Math.ceil(low / step); k * step <= high + step * 1e-9; k++) ticks.push(k * step);
  return ticks;
}

// A scale of the y axis: a function from values to pixels, and its ticks. A logarithmic one puts 0 on the floor.
function scale(values, log, fromZero) {
  const positive = values.filter((v) => v > 0);
  const height = H - TOP - BOTTOM;
  if (log && positive.length) {
    let low = Math.floor(Math.log10(Math.min(...positive))), high = Math.ceil(Math.log10(Math.max(...positive)));
    if (low === high) high += 1;
    const every = Math.ceil((high - low) / 5), ticks = [];
    for (let power = low; power <= high; power += every) ticks.push(10 ** power);
    return { ticks, y: (v) => H - BOTTOM - (v > 0 ? Math.max(0, (Math.log10(v) - low) / (high - low)) : 0) * height };
  }
  let low = fromZero ? 0 : Math.min(...values), high = Math.max(...values);
  if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
  return { ticks: linearTicks(low, high), y: (v) => H - BOTTOM - ((v - low) / (high - low)) * height };
}

function frame(figure, label, steps, axis) {
  const svg = make(figure, "svg", { viewBox: `0 0 ${W} ${H}`, role: "img", tabindex: "0", "aria-label": label });
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  const x = (step) => LEFT + (last > first ? (step - first) / (last - first) : 0.5) * (W - LEFT - RIGHT);
  for (const tick of axis.ticks) {
    make(svg, "line", { class: "axis", x1: LEFT, x2: W - RIGHT, y1: axis.y(tick), y2: axis.y(tick) });
    make(svg, "text", { class: "tick", x: LEFT - 4, y: axis.y(tick) + 4, "text-anchor": "end" }, show(tick));
  }
  for (const tick of first < last ? linearTicks(first, last).filter(Number.isInteger) : [first])
    make(svg, "text", { class: "tick", x: x(tick), y: H - 6, "text-anchor": "middle" }, tick);
  for (const warning of data.warnings) {
    if (warning.since_step < first || warning.since_step > last) continue;
    const at = x(warning.since_step);
    make(svg, "line", { class: "warning", x1: at, x2: at, y1: TOP, y2: H - BOTTOM });
  }
  return { svg, x, first, last };
}

// Moves a cursor with the pointer or the arrow keys, and writes the values at its step into the readout.
function addCursor(plot, figure, steps, describe) {
  const readout = make(figure, "p", { class: "readout", "aria-live": "polite" });
  const line = make(plot.svg, "line", { class: "cursor", y1: TOP, y2: H - BOTTOM, visibility: "hidden" });
  let place = steps.length - 1;
  const move = (to) => {
    place = Math.min(steps.length - 1, Math.max(0, to));
    const at = plot.x(steps[place]);
    line.setAttribute("x1", at); line.setAttribute("x2", at); line.setAttribute("visibility", "visible");
    describe(readout, steps[place]);
  };
  plot.svg.addEventListener("pointermove", (event) => {
    const box = plot.svg.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width * W - LEFT) / (W - LEFT - RIGHT);
    const wanted = plot.first + share * (plot.last - plot.first);
    let low = 0, high = steps.length - 1;
    while (low < high) { const middle = (low + high) >> 1; steps[middle] < wanted ? low = middle + 1 : high = middle; }
    move(low > 0 && wanted - steps[low - 1] < steps[low] - wanted ? low - 1 : low);
  });
  plot.svg.addEventListener("keydown", (event) => {
    const jump = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity }[event.key];
    if (jump === undefined) return;
    event.preventDefault();
    move(jump === -Infinity ? 0 : jump === Infinity ? steps.length - 1 : place + jump);
  });
  describe(readout, steps[steps.length - 1]);
}

const unionOfSteps = (lists) => [...new Set(lists.flat())].sort((a, b) => a - b);

function lineChart(parent, chart) {
  const lines = chart.lines.filter(([metric]) => data.series[metric]).map(([metric, label], place) => {
    const { s, v } = data.series[metric];
    return { label, place: place % 7, steps: s, raw: v, values: v.map((y) => typeof y === "number" ? y : NaN), at: new Map(s.map((step, i) => [step, v[i]])) };
  });
  const finite = lines.flatMap((line) => line.values).filter(Number.isFinite);
  if (!finite.length) return;
  const steps = unionOfSteps(lines.map((line) => line.steps));
  const figure = make(parent, "figure");
  make(figure, "figcaption", {}, chart.unit ? `${chart.title} (${chart.unit})` : chart.title);
  const said = lines.map((line) => `${line.label} ${show(line.raw[0])} at first, ${show(line.raw.at(-1))} at last`).join("; ");
  const axis = scale(finite, chart.log, false);
  const plot = frame(figure, `${chart.title}, steps ${steps[0]} to ${steps.at(-1)}: ${said}`, steps, axis);
  const draw = (line, values, kind) => {
    let d = "", pen = "M";
    values.forEach((value, i) => {
      if (!Number.isFinite(value)) { pen = "M"; return; }
      d += `${pen}${plot.x(line.steps[i]).toFixed(1)} ${axis.y(value).toFixed(1)}`;
      pen = "L";
    });
    make(plot.svg, "path", { class: `line c${line.place} dash${line.place} ${kind}`, d });
    if (values.length < 20) values.forEach((value, i) => Number.isFinite(value) && make(plot.svg, "circle",
      { class: `area c${line.place}`, r: 2.5, cx: plot.x(line.steps[i]), cy: axis.y(value) }));
  };
  for (const line of lines) {
    const window = chart.smooth ? Math.floor(line.values.length / 20) : 0;
    draw(line, line.values, window > 1 ? "faint" : "");
    if (window > 1) draw(line, trailingMean(line.values, window), "");
  }
  addCursor(plot, figure, steps, (readout, step) => {
    readout.textContent = `step ${step}`;
    for (const line of lines) if (line.at.has(step)) {
      readout.append("  ");
      make(readout, "span", { class: `key c${line.place}` }, `${line.label} ${show(line.at.get(step))}`);
    }
  });
}

// Groups of bars over the whole run. On a logarithmic axis a bar of 0 has no height.
function barChart(parent, chart) {
  const heights = chart.groups.flatMap(([, values]) => values).filter(Number.isFinite);
  const figure = make(parent, "figure");
  make(figure, "figcaption", {}, `${chart.title} (${chart.unit})`);
  const said = chart.groups.map(([label, values]) => `${label}: ${chart.names.map((name, i) => `${name} ${values[i] === null ? "none" : show(values[i])}`).join(", ")}`).join("; ");
  const svg = make(figure, "svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${chart.title}. ${said}` });
  const axis = scale(heights, chart.log, true);
  for (const tick of axis.ticks) {
    make(svg, "line", { class: "axis", x1: LEFT, x2: W - RIGHT, y1: axis.y(tick), y2: axis.y(tick) });
    make(svg, "text", { class: "tick", x: LEFT - 4, y: axis.y(tick) + 4, "text-anchor": "end" }, show(tick));
  }
  const room = (W - LEFT - RIGHT) / chart.names.length, width = 0.8 * room / chart.groups.length;
  chart.names.forEach((name, i) => {
    const left = LEFT + (i + 0.1) * room;
    make(svg, "text", { class: "tick", x: LEFT + (i + 0.5) * room, y: H - 6, "text-anchor": "middle" }, name);
    chart.groups.forEach(([label, values], place) => {
      if (values[i] === null) return;
      const top = axis.y(values[i]);
      const bar = make(svg, "rect", { class: `area c${place % 7}`, x: left + place * width, y: top, width, height: H - BOTTOM - top });
      make(bar, "title", {}, `${label}, ${name}: ${show(values[i])}`);
    });
  });
  const readout = make(figure, "p", { class: "readout" });
  chart.groups.forEach(([label], place) => make(readout, "span", { class: `key c${place % 7}` }, `${label}  `));
}

function phaseChart(parent) {
  const named = data.phases.filter((phase) => data.series[`timing_s/${phase}`]);
  if (!named.length) return;
  const steps = unionOfSteps(named.map((phase) => data.series[`timing_s/${phase}`].s));
  const seconds = named.map((phase) => {
    const { s, v } = data.series[`timing_s/${phase}`], at = new Map(s.map((step, i) => [step, v[i]]));
    return steps.map((step) => Number.isFinite(at.get(step)) ? at.get(step) : 0);
  });
  const totals = steps.map((_, i) => seconds.reduce((sum, one) => sum + one[i], 0));
  const figure = make(parent, "figure");
  make(figure, "figcaption", {}, "Time of a step by phase (seconds)");
  const axis = scale(totals, false, true);
  const plot = frame(figure, `Seconds of a step by phase: ${named.join(", ")}; ${show(totals.at(-1))} s at last`, steps, axis);
  let below = steps.map(() => 0);
  named.forEach((phase, place) => {
    const above = below.map((base, i) => base + seconds[place][i]);
    const point = (values) => (step, i) => `${plot.x(step).toFixed(1)} ${axis.y(values[i]).toFixed(1)}`;
    const d = `M${steps.map(point(above)).join("L")}L${steps.map(point(below)).reverse().join("L")}Z`;
    make(plot.svg, "path", { class: `area c${place % 7}`, d });
    below = above;
  });
  addCursor(plot, figure, steps, (readout, step) => {
    const i = steps.indexOf(step);
    readout.textContent = `step ${step}  ${show(totals[i])} s`;
    named.forEach((phase, place) => {
      readout.append("  ");
      make(readout, "span", { class: `key c${place % 7}` }, `${phase} ${show(seconds[place][i])}`);
    });
  });
}

function table(parent, head, rows) {
  const body = make(parent, "table");
  const top = make(make(body, "thead"), "tr");
  for (const name of head) make(top, "th", { scope: "col" }, name);
  const lines = make(body, "tbody");
  for (const row of rows) {
    const line = make(lines, "tr");
    for (const cell of row) make(line, "td", {}, cell);
  }
}

function warnings(section) {
  for (const text of data.damage) make(section, "p", {}, text);
  if (!data.warnings.length) {
    if (!data.damage.length) make(section, "p", {}, "None.");
  } else table(section, ["since step", "sign", "what was seen", "what to try"],
    data.warnings.map((one) => [one.since_step, one.sign, one.text, one.remedy]));
}

function summary(section) {
  const entries = Object.entries(data.summary ?? {}).filter(([, value]) => value !== null);
  if (entries.length) table(section, ["", ""], entries.map(([name, value]) => [name, show(value)]));
  else make(section, "p", {}, "The run writes its summary at its end.");
}

function status() {
  const found = data.summary;
  const state = !found ? "running" : found.failed ? `failed: ${found.failed}` : found.finished ? "finished" : "not finished";
  const of = data.total === null ? "" : ` of ${data.total}`;
  document.getElementById("status").textContent = `${state}, step ${data.step}${of}, written ${data.written}`;
}

// One response: its facts, its tokens by δ, and its largest δ in words.
function response(parent, sample) {
  const facts = [`step ${sample.step}`, sample.reward === null ? null : `reward ${show(sample.reward)}`,
    `advantage ${show(sample.advantage)}`, `${sample.length} tokens`,
    sample.turns && `${sample.turns} turns`, sample.finish_reason && `ended by ${sample.finish_reason}`];
  make(parent, "h3", {}, facts.filter((fact) => fact).join(" · "));
  make(parent, "p", {}, `Prompt: ${sample.prompt}`);
  const box = make(parent, "p", { class: "response", tabindex: "0", "aria-label": "Response, tokens marked by δ" });
  let largest = 0;
  sample.tokens.forEach((token, place) => {
    const delta = Number(sample.delta[place]), size = Math.abs(delta);
    if (sample.left_out && place === sample.tokens.length / 2) make(box, "em", {}, ` … ${sample.left_out} tokens left out … `);
    if (!(size <= Math.abs(Number(sample.delta[largest])))) largest = place;
    const strength = size < 1e-4 ? 0 : size < 1e-3 ? 1 : size < 1e-2 ? 2 : size < 1e-1 ? 3 : 4;
    const kind = strength ? `${delta < 0 ? "down" : "up"} s${strength}` : "";
    if (sample.of_model && !sample.of_model[place]) make(box, "span", { class: "context", title: "not of the model" }, token);
    else make(box, "span", { class: kind, title: `δ = ${show(delta)}` }, token);
  });
  if (sample.tokens.length)
    make(parent, "p", { class: "readout" }, `Largest |δ|: ${show(Number(sample.delta[largest]))} at token ${JSON.stringify(sample.tokens[largest])}`);
}

function samples(section) {
  if (!data.samples.length) { make(section, "p", {}, "None were written."); return; }
  make(section, "p", {}, "δ is the trainer's log-prob minus the rollout's. A solid blue line under a token means δ > 0, a dotted "
    + "orange one δ < 0; without a line |δ| is below 1e-4, and the ground darkens at 1e-3, 1e-2 and 1e-1.");
  const steps = [...new Set(data.samples.map((sample) => sample.step))];
  const label = make(section, "label", {}, "Step ");
  const select = make(label, "select");
  for (const step of steps) make(select, "option", { value: step }, step);
  const list = make(section, "div");
  const fill = () => {
    list.replaceChildren();
    for (const sample of data.samples) if (String(sample.step) === select.value) response(list, sample);
  };
  select.value = String(steps.at(-1));
  select.addEventListener("change", fill);
  fill();
}

// All metrics, by the part of the name before the first slash. A group is drawn when it is opened.
function allMetrics(section) {
  const groups = new Map();
  for (const metric of Object.keys(data.series)) {
    const name = metric.includes("/") ? metric.slice(0, metric.indexOf("/")) : "other";
    groups.set(name, [...(groups.get(name) ?? []), metric]);
  }
  for (const [name, metrics] of groups) {
    const details = make(section, "details");
    make(details, "summary", {}, `${name} (${metrics.length})`);
    details.addEventListener("toggle", () => {
      if (details.querySelector(".grid")) return;
      const grid = make(details, "div", { class: "grid" });
      for (const metric of metrics) lineChart(grid, { title: metric, unit: "", lines: [[metric, ""]] });
    });
  }
}

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
status();
warnings(document.getElementById("warnings"));
summary(document.getElementById("summary"));
const charts = make(document.getElementById("charts"), "div", { class: "grid" });
for (const chart of data.charts) lineChart(charts, chart);
for (const chart of data.bars) barChart(charts, chart);
phaseChart(charts);
samples(document.getElementById("samples"));
allMetrics(document.getElementById("metrics"));
for (const name of ["config", "versions"]) make(document.getElementById(name), "pre", { tabindex: "0" }, data[name] || "not written");
