// Draws what a dashboard's file says with Grafana's components: frames, stat and timeseries panels, legends, units, colours.
// A state timeline is not in @grafana/ui: that panel's bars are drawn here, in Grafana's frame and colours.

import "@fontsource/inter/latin-400.css";
import "@fontsource/inter/latin-500.css";
import { applyFieldOverrides, createTheme, dateTime, FieldConfigOptionsRegistry, FieldType, getFieldDisplayName,
  getFieldDisplayValues, toDataFrame } from "@grafana/data";
import { BigValue, GlobalStyles, PanelChrome, ThemeContext, TimeSeries } from "@grafana/ui";
import { createRoot } from "react-dom/client";

// Grafana's grid: 24 columns, rows of 30 pixels, 8 between cells; 16 around all.
const CELL_PX = 38, GAP_PX = 8, MARGIN_PX = 16;
const COLUMN_PX = (window.innerWidth - 2 * MARGIN_PX + GAP_PX) / 24;

const { dashboard, answers, note } = JSON.parse(document.getElementById("data").textContent);
const theme = createTheme();
const timeZone = "utc";
const replaceVariables = (text) => text;
const timeRange = { from: dateTime(answers.start * 1000), to: dateTime(answers.end * 1000), raw: { from: "", to: "" } };
const times = [];
for (let at = answers.start; at <= answers.end + 1e-6; at += answers.step_s) times.push(Math.round(at * 1000));

// What a panel's plugin registers: the settings that it knows. Here, all that the file uses.
const settings = dashboard.panels.flatMap(({ fieldConfig }) => fieldConfig ? [
  ...Object.keys(fieldConfig.defaults).filter((key) => key !== "custom"),
  ...Object.keys(fieldConfig.defaults.custom ?? {}).map((key) => `custom.${key}`),
  ...fieldConfig.overrides.flatMap(({ properties }) => properties.map(({ id }) => id)),
] : []);
const fieldConfigRegistry = new FieldConfigOptionsRegistry(() => [...new Set(settings)].map((id) => ({
  id, name: id, path: id.replace(/^custom\./, ""), isCustom: id.startsWith("custom."),
  process: (value) => value, shouldApply: () => true,
})));

// As Grafana's Prometheus data source does it: a frame a series, nulls where a step has no sample.
function framesOf({ id, fieldConfig }) {
  const found = answers.queries.filter((query) => query.panel_id === id);
  const data = found.flatMap(({ legend, series }) => series.map(({ labels, times: at, values }) => {
    const column = new Array(times.length).fill(null);
    at.forEach((time, k) => { column[Math.round((time - answers.start) / answers.step_s)] = values[k]; });
    const displayNameFromDS = legend.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label) => labels[label] ?? "");
    return toDataFrame({ fields: [
      { name: "Time", type: FieldType.time, values: times, config: { interval: answers.step_s * 1000 } },
      { name: "Value", type: FieldType.number, values: column, labels, config: { displayNameFromDS } },
    ] });
  }));
  return applyFieldOverrides({ data, fieldConfig, fieldConfigRegistry, replaceVariables, theme, timeZone });
}

function Stat({ panel: { fieldConfig, options }, frames, width, height }) {
  const [{ display, sparkline }] = getFieldDisplayValues({
    data: frames, fieldConfig, reduceOptions: options.reduceOptions, sparkline: options.graphMode === "area",
    replaceVariables, theme, timeZone,
  });
  return <BigValue {...{ value: display, sparkline, theme, width, height, ...options }} />;
}

function Series({ panel: { options }, frames, width, height }) {
  return <TimeSeries {...{ frames, timeRange, timeZone, width, height, options, legend: options.legend }} />;
}

function States({ frames, height }) {
  const lines = frames.map((frame) => ({ name: getFieldDisplayName(frame.fields[1], frame, frames), field: frame.fields[1] }))
    .sort((one, other) => one.name.localeCompare(other.name));
  const row = Math.min(24, height / lines.length);
  return lines.map(({ name, field }) => <div key={name} style={{ display: "flex", alignItems: "center", height: row, fontSize: 12 }}>
    <span style={{ width: 170, flex: "none", color: theme.colors.text.secondary }}>{name}</span>
    {field.values.map((value, k) => <i key={k} style={{
      flex: 1, height: 0.8 * row, opacity: 0.7, background: value === null ? "none" : field.display(value).color,
    }} />)}
  </div>);
}

const CONTENTS = { stat: Stat, timeseries: Series, "state-timeline": States };

function Panel({ panel }) {
  const { x, y, w, h } = panel.gridPos;
  const width = w * COLUMN_PX - GAP_PX, height = h * CELL_PX - GAP_PX;
  const style = { position: "absolute", left: x * COLUMN_PX, top: y * CELL_PX, width, height };
  if (panel.type === "row") return <h5 style={{ ...style, paddingTop: 6 }}>{panel.title}</h5>;
  const Content = CONTENTS[panel.type];
  if (!Content) throw new Error(`panel type ${panel.type} is not known here`);
  const frames = framesOf(panel);
  return <div style={style}>
    <PanelChrome title={panel.title} width={width} height={height}>
      {(width, height) => frames.length ? <Content {...{ panel, frames, width, height }} /> : "No data"}
    </PanelChrome>
  </div>;
}

function Page() {
  const [from, to] = [answers.start, answers.end].map((at) => new Date(at * 1000).toISOString().slice(0, 19).replace("T", " "));
  const chosen = dashboard.templating.list.map(({ label, type }) => `${label}: ${type === "datasource" ? "Prometheus" : "All"}`);
  return <ThemeContext.Provider value={theme}>
    <GlobalStyles />
    <header style={{ display: "flex", alignItems: "baseline", gap: 24, margin: MARGIN_PX, height: 28 }}>
      <h3>{dashboard.title}</h3>
      {chosen.map((text) => <span key={text}>{text}</span>)}
      <span style={{ marginLeft: "auto" }}>{from} to {to} UTC</span>
    </header>
    <main style={{ position: "relative", margin: MARGIN_PX }}>
      {dashboard.panels.map((panel) => <Panel key={panel.id} panel={panel} />)}
    </main>
    <footer style={{ position: "absolute", bottom: 12, left: MARGIN_PX, fontSize: 12, color: theme.colors.text.secondary }}>{note}</footer>
  </ThemeContext.Provider>;
}

createRoot(document.getElementById("page")).render(<Page />);
