"use strict";

// Draws what a dashboard's file says: rows, stat, timeseries and state-timeline panels, with the options used there.

const COLOURS = ["#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#8ab8ff", "#b877d9", "#fade2a", "#37872d", "#ff7383"];
const NAMED = { green: "#73bf69", red: "#f2495c", orange: "#ff9830", blue: "#5794f2", yellow: "#fade2a" };
const GRID = "#26282f", TEXT = "#8e8ea0";
const CELL_PX = 38, GAP_PX = 8;

const { dashboard, answers } = JSON.parse(document.getElementById("data").textContent);
const main = document.querySelector("main");

// -- numbers ----------------------------------------------------------------------------------------------------------

function scaled(value, steps) {
  const step = steps.find(([size]) => Math.abs(value) >= size) ?? steps[steps.length - 1];
  return [value / step[0], step[1]];
}

const UNITS = {
  s: (v) => (v === 0 ? [0, " s"] : scaled(v, [[1, " s"], [1e-3, " ms"], [1e-6, " µs"]])),
  percentunit: (v) => [v * 100, "%"],
  reqps: (v) => [v, " req/s"],
  ops: (v) => scaled(v, [[1e3, "K ops/s"], [1, " ops/s"], [1, " ops/s"]]),
  bytes: (v) => scaled(v, [[2 ** 30, " GiB"], [2 ** 20, " MiB"], [2 ** 10, " KiB"], [1, " B"]]),
  short: (v) => scaled(v, [[1e6, " Mil"], [1e3, "K"], [1, ""]]),
};

function parts(value, unit, decimals) {
  if (!(unit in UNITS)) throw new Error(`unit ${unit} is not known here`);
  const [number, suffix] = UNITS[unit](value);
  const size = Math.abs(number);
  const digits = decimals ?? (Number.isInteger(number) || size >= 100 ? 0 : size >= 10 ? 1 : 2);
  return [number.toFixed(digits).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, ""), suffix];
}

const text = (value, unit, decimals) => (value === null ? "-" : parts(value, unit, decimals).join(""));
const clock = (at) => new Date(at * 1000).toISOString().slice(11, 19);
const finite = (values) => values.filter((value) => value !== null);
const CALCS = {
  mean: ["Mean", (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null)],
  lastNotNull: ["Last", (values) => values.at(-1) ?? null],
};

// -- series -----------------------------------------------------------------------------------------------------------

const times = [];
for (let at = answers.start; at <= answers.end + 1e-6; at += answers.step_s) times.push(at);

function seriesOf(panel) {
  const found = [];
  for (const query of answers.queries.filter((query) => query.panel_id === panel.id)) {
    for (const line of query.series) {
      const values = new Array(times.length).fill(null);
      line.times.forEach((at, k) => { values[Math.round((at - answers.start) / answers.step_s)] = line.values[k]; });
      const name = query.legend.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label) => line.labels[label] ?? "");
      found.push({ name, values });
    }
  }
  for (const series of found) Object.assign(series, settingsOf(panel, series.name));
  return found;
}

function settingsOf(panel, name) {
  const settings = { unit: panel.fieldConfig.defaults.unit, right: false };
  for (const { matcher, properties } of panel.fieldConfig.overrides) {
    if (matcher.id !== "byName") throw new Error(`matcher ${matcher.id} is not known here`);
    if (matcher.options !== name) continue;
    for (const { id, value } of properties) {
      if (id === "unit") settings.unit = value;
      else if (id === "custom.axisPlacement") settings.right = value === "right";
      else throw new Error(`override ${id} is not known here`);
    }
  }
  return settings;
}

// -- panels -----------------------------------------------------------------------------------------------------------

function element(kind, className, content) {
  const made = document.createElement(kind);
  if (className) made.className = className;
  if (content !== undefined) made.textContent = content;
  return made;
}

function place(box, { x, y, w, h }) {
  const column = (main.clientWidth + GAP_PX) / 24;
  box.style.left = `${x * column}px`;
  box.style.width = `${w * column - GAP_PX}px`;
  box.style.top = `${y * CELL_PX}px`;
  box.style.height = `${h * CELL_PX - GAP_PX}px`;
  main.append(box);
}

function colourAt(value, steps) {
  const step = steps.filter((step) => step.value === null || value >= step.value).at(-1);
  return NAMED[step.color] ?? step.color;
}

function drawStat(body, panel, series) {
  const { unit, decimals, thresholds, max } = panel.fieldConfig.defaults;
  const values = finite(series[0].values);
  const last = values.at(-1);
  const colour = colourAt(last, thresholds.steps);
  const [number, suffix] = parts(last, unit, decimals);
  const figure = element("div", "stat");
  const line = element("div", "", number);
  line.append(element("small", "", suffix));
  figure.style.color = colour;
  figure.append(line);
  const spark = element("div", "spark");
  body.append(figure, spark);
  new uPlot({
    width: body.clientWidth, height: 36, legend: { show: false }, cursor: { show: false }, padding: [2, 0, 0, 0],
    axes: [{ show: false }, { show: false }],
    scales: { x: { time: false }, y: { range: (_, low, high) => [Math.min(0, low), Math.max(high, 1e-9) * 1.05] } },
    series: [{}, { stroke: colour, width: 1.2, fill: colour + "30", points: { show: false }, spanGaps: true }],
  }, [times, series[0].values], spark);
}

function drawLegend(box, panel, series) {
  const { calcs } = panel.options.legend;
  const legend = element("div", "legend"), table = element("table");
  const head = table.insertRow();
  for (const title of ["Name", ...calcs.map((calc) => CALCS[calc][0])]) head.append(element("th", "", title));
  for (const line of series) {
    const row = table.insertRow(), name = row.insertCell();
    const mark = element("i");
    mark.style.background = line.colour;
    name.append(mark, line.name + (line.right ? "  (right axis)" : ""));
    for (const calc of calcs) row.insertCell().textContent = text(CALCS[calc][1](finite(line.values)), line.unit);
  }
  legend.append(table);
  box.append(legend);
}

function stacked(series) {
  const sums = new Array(times.length).fill(0);
  return series.map((line) => line.values.map((value, k) => (value === null ? null : (sums[k] += value))));
}

function drawTimeSeries(body, box, panel, series) {
  const { custom, min, max } = panel.fieldConfig.defaults;
  series.forEach((line, k) => { line.colour = COLOURS[k % COLOURS.length]; });
  drawLegend(box, panel, series);
  const isStacked = custom.stacking.mode === "normal";
  const columns = isStacked ? stacked(series) : series.map((line) => line.values);
  const range = (_, low, high) => {
    if (low === null) return [0, max ?? 1];
    const top = max ?? (high > 0 ? high * 1.12 : 1);
    return [min ?? low, top];
  };
  const fill = Math.round(custom.fillOpacity * 2.55).toString(16).padStart(2, "0");
  const axis = { stroke: TEXT, grid: { stroke: GRID, width: 1 }, ticks: { show: false }, font: "11px DejaVu Sans" };
  const yAxis = (scale, side) => {
    const unit = series.find((line) => line.right === (scale === "right"))?.unit ?? "short";
    return { ...axis, scale, side, size: 68, gap: 4, values: (_, ticks) => ticks.map((tick) => text(tick, unit)),
      space: 26, grid: scale === "right" ? { show: false } : axis.grid };
  };
  const hasRight = series.some((line) => line.right);
  new uPlot({
    width: body.clientWidth, height: body.clientHeight, legend: { show: false }, cursor: { show: false },
    padding: [8, hasRight ? 0 : 22, 0, 0], tzDate: (at) => uPlot.tzDate(new Date(at * 1e3), "Etc/UTC"),
    scales: { x: { time: true }, left: { range }, right: { range } },
    axes: [
      { ...axis, size: 24, gap: 3, space: 64,
        values: (_, ticks) => ticks.map((at) => (at % 60 ? clock(at) : clock(at).slice(0, 5))) },
      yAxis("left", 3), ...(hasRight ? [yAxis("right", 1)] : []),
    ],
    bands: isStacked ? series.slice(1).map((_, k) => ({ series: [k + 2, k + 1] })) : [],
    series: [{}, ...series.map((line) => ({
      scale: line.right ? "right" : "left", stroke: line.colour, width: custom.lineWidth * 1.2,
      fill: line.colour + fill, points: { show: finite(line.values).length === 1 }, spanGaps: custom.spanNulls,
    }))],
  }, [times, ...columns], body);
}

function drawStates(body, panel, series) {
  const { thresholds } = panel.fieldConfig.defaults;
  const list = element("div", "states");
  const span = times.at(-1) - times[0];
  for (const line of [...series].sort((a, b) => a.name.localeCompare(b.name))) {
    const row = element("div"), bar = element("div", "bar");
    for (let from = 0; from < times.length;) {
      let to = from;
      while (to < times.length && line.values[to] === line.values[from]) to += 1;
      if (line.values[from] !== null) {
        const part = element("span");
        const end = times[Math.min(to, times.length - 1)];
        part.style.left = `${(100 * (times[from] - times[0])) / span}%`;
        part.style.width = `${(100 * (end - times[from])) / span}%`;
        part.style.background = colourAt(line.values[from], thresholds.steps);
        bar.append(part);
      }
      from = to;
    }
    row.append(element("label", "", line.name), bar);
    list.append(row);
  }
  const ticks = element("div", "ticks");
  for (const share of [0.1, 0.5, 0.9]) {
    const tick = element("span", "", clock(times[0] + share * span));
    tick.style.left = `${share * 100}%`;
    ticks.append(tick);
  }
  body.append(list, ticks);
}

const header = document.querySelector("header");
header.append(element("h1", "", dashboard.title));
for (const variable of dashboard.templating.list) {
  const box = element("div", "variable");
  box.append(element("b", "", variable.label), element("span", "", variable.type === "datasource" ? "Prometheus" : "All"));
  header.append(box);
}
const day = new Date(answers.start * 1000).toISOString().slice(0, 10);
header.append(element("div", "range", `${day} ${clock(answers.start)} to ${clock(answers.end)} UTC`));

for (const panel of dashboard.panels) {
  const box = element("div", panel.type === "row" ? "row" : "panel");
  place(box, panel.gridPos);
  if (panel.type === "row") { box.textContent = panel.title; continue; }
  const body = element("div", "body");
  box.append(element("h2", "", panel.title), body);
  const series = seriesOf(panel);
  if (!series.some((line) => finite(line.values).length)) body.append(element("div", "none", "No data"));
  else if (panel.type === "stat") drawStat(body, panel, series);
  else if (panel.type === "timeseries") drawTimeSeries(body, box, panel, series);
  else if (panel.type === "state-timeline") drawStates(body, panel, series);
  else throw new Error(`panel type ${panel.type} is not known here`);
}
