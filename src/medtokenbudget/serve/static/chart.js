// A line chart over all budgets as SVG. The lines are drawn once; `move` moves the markers to the current budget.

const NS = "http://www.w3.org/2000/svg";
const EDGE = { left: 46, right: 26, top: 14, bottom: 38 };

function node(name, attributes, parent, text) {
  const element = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent?.append(element);
  return element;
}

/**
 * Draw `lines`, [{style, name, values, point: bool}] with one value per budget, into `box`. Returns {move(index)}.
 */
export function chart(box, budgets, lines, title) {
  const width = Math.max(300, Math.round(box.clientWidth || 900));
  const height = Math.round(Math.min(300, Math.max(210, width * 0.32)));
  const x = (budget) => EDGE.left + budget * (width - EDGE.left - EDGE.right);
  const y = (value) => height - EDGE.bottom - value * (height - EDGE.top - EDGE.bottom);
  const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  for (const tick of [0, 0.25, 0.5, 0.75, 1]) {
    node("line", { x1: x(0), x2: x(1), y1: y(tick), y2: y(tick), class: "axis" }, svg);
    node("text", { x: EDGE.left - 8, y: y(tick) + 4, "text-anchor": "end", class: "tick" }, svg, `${100 * tick}%`);
  }
  for (const tick of [0.1, 0.3, 0.5, 0.7, 1]) {
    node("text", { x: x(tick), y: height - EDGE.bottom + 18, "text-anchor": "middle", class: "tick" }, svg, `${Math.round(100 * tick)}%`);
  }
  node("text", { x: x(0.5), y: height - 4, "text-anchor": "middle", class: "tick" }, svg, "Token budget");
  for (const line of lines) {
    const d = line.values.map((value, i) => `${i ? "L" : "M"}${x(budgets[i]).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    node("path", { d, class: `series ${line.style}` }, svg);
  }
  key(svg, lines, x(1), keyBottom(lines, budgets, y));
  const now = node("line", { y1: y(0), y2: y(1), class: "now" }, svg);
  const points = lines.filter((line) => line.point).map((line) => ({ line, mark: mark(line.style, svg) }));
  box.replaceChildren(svg);
  return {
    move(index) {
      const at = x(budgets[index]);
      now.setAttribute("x1", at);
      now.setAttribute("x2", at);
      for (const { line, mark: shape } of points) shape.setAttribute("transform", `translate(${at.toFixed(1)} ${y(line.values[index]).toFixed(1)})`);
    },
  };
}

/** A disc for the first line and a square for the second, so they differ by shape as well as by color. */
function mark(style, svg) {
  if (style === "b") return node("rect", { x: -6, y: -6, width: 12, height: 12, class: "point b" }, svg);
  return node("circle", { r: 7, class: "point a" }, svg);
}

/** The legend is at the bottom right if the lines end high, else at the top right. */
function keyBottom(lines, budgets, y) {
  const ends = lines.filter((line) => line.point).flatMap((line) => line.values.filter((_, i) => budgets[i] > 0.6));
  const high = ends.reduce((sum, value) => sum + value, 0) / ends.length > 0.5;
  return high ? y(0) : y(1) + 18 * lines.length + 8;
}

function key(svg, lines, right, bottom) {
  const left = right - 46 - 7.2 * Math.max(...lines.map((line) => line.name.length));
  lines.forEach((line, i) => {
    const y = bottom - 14 - 18 * (lines.length - 1 - i);
    node("line", { x1: left, x2: left + 30, y1: y - 4, y2: y - 4, class: `series ${line.style}` }, svg);
    node("text", { x: left + 38, y, class: line.point ? `label-${line.style}` : "mark-text" }, svg, line.name);
  });
}
