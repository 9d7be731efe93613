// A line of the last values, drawn to its own height.

import { svg } from "./dom.js";

export function sparkline(values, length) {
  const [width, height] = [240, 40];
  const most = Math.max(1, ...values);
  const points = values.map((value, i) => {
    const x = width * (1 - (values.length - 1 - i) / (length - 1));
    return `${x.toFixed(1)},${(height - 2 - (height - 6) * (value / most)).toFixed(1)}`;
  });
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", class: "spark", "aria-hidden": "true" });
  if (points.length > 1) {
    const start = points[0].split(",")[0];
    picture.append(
      svg("polygon", { points: `${start},${height} ${points.join(" ")} ${width},${height}`, class: "spark-area" }),
      svg("polyline", { points: points.join(" "), class: "spark-line" }),
    );
  }
  return picture;
}
