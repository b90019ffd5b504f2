// The panel of one method: menu, image, numbers and class probabilities. The page has one or two of them.

import { paint } from "./draw.js";
import { percent, sentence } from "./view.js";

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export class Panel {
  /** side: "a" or "b"; onChoose(name) is called when another method is chosen. */
  constructor(side, onChoose) {
    const root = document.getElementById("panel-template").content.firstElementChild.cloneNode(true);
    this.side = side;
    this.root = root;
    root.dataset.side = side;
    this.select = root.querySelector("select");
    this.select.id = `selector-${side}`;
    const label = root.querySelector(".choose label");
    label.htmlFor = this.select.id;
    label.textContent = side === "a" ? "Method" : "Second method";
    root.setAttribute("aria-label", side === "a" ? "Method" : "Second method");
    this.canvas = root.querySelector("canvas");
    this.legend = root.querySelector(".legend");
    this.stats = root.querySelector(".stats");
    this.bars = root.querySelector(".bars tbody");
    this.about = root.querySelector(".about");
    this.select.addEventListener("change", () => onChoose(this.select.value));
  }

  /** Fill the menu; methods: [{name, title, about}], chosen: a name. */
  offer(methods, chosen) {
    this.select.replaceChildren(...methods.map(({ name, title }) => new Option(title, name, false, name === chosen)));
    this.describe(methods.find(({ name }) => name === chosen));
  }

  describe({ about }) {
    this.about.textContent = about;
  }

  /** One row per class; `truth` is the true class, if known. */
  classes(names, truth) {
    this.root.querySelector(".bars").hidden = !names.length;
    this.rows = names.map((name) => {
      const row = element("tr", name === truth ? "truth" : "");
      const head = element("th", "", name);
      head.scope = "row";
      const cell = element("td");
      const bar = element("div", "bar");
      const track = element("div", "track");
      track.setAttribute("aria-hidden", "true");
      const fill = element("div", "fill");
      const value = element("span", "value");
      track.append(fill);
      bar.append(track, value);
      cell.append(bar);
      row.append(head, cell);
      return { row, fill, value };
    });
    this.bars.replaceChildren(...this.rows.map(({ row }) => row));
  }

  render(title, scene, view, show) {
    this.paint(title, scene, view, show);
    view.probabilities.forEach((p, i) => {
      const { row, fill, value } = this.rows[i];
      fill.style.width = `${100 * p}%`;
      value.textContent = percent(p);
      row.classList.toggle("top1", i === view.top);
    });
    this.numbers(view);
    this.keys(scene, view, show);
  }

  paint(title, scene, view, show) {
    const { canvas } = this;
    const ratio = scene.picture.naturalHeight / scene.picture.naturalWidth;
    const width = Math.max(1, Math.round(canvas.clientWidth * Math.min(2, window.devicePixelRatio || 1)));
    const height = Math.max(1, Math.round(width * ratio));
    if (canvas.width !== width || canvas.height !== height) {
      canvas.width = width;
      canvas.height = height;
    }
    paint(canvas.getContext("2d"), width, height, scene, view, show);
    canvas.setAttribute("aria-label", `The image with the kept patches highlighted. ${sentence(title, view)}`);
  }

  numbers(view) {
    const rows = [[view.kept ? "Kept" : "Tokens", `${view.k}`, `of ${view.n}`]];
    if (view.retention !== null) {
      rows.push(["Retention", percent(view.retention), `${view.lesion - view.lost} of ${view.lesion}`]);
      rows.push(["Ceiling", percent(view.ceiling), ""]);
      rows.push(["Of ceiling", percent(view.ofCeiling), ""]);
      rows.push(["Lesion lost", `${view.lost}`, view.lost === 1 ? "patch" : "patches"]);
    }
    this.stats.replaceChildren(
      ...rows.map(([title, value, unit]) => {
        const box = element("div");
        const number = element("dd", "", value);
        number.append(element("small", "", unit));
        box.append(element("dt", "", title), number);
        return box;
      }),
    );
  }

  keys(scene, view, show) {
    const keys = [];
    if (view.groups) keys.push(["merged", "patches of one color are merged into one token"]);
    if (view.groups && show.lesion && scene.lesion) keys.push(["outline", "lesion"]);
    if (show.scores) keys.push(["ramp", "score, low to high"]);
    if (view.kept && show.lesion && scene.lesion) keys.push(["lesion", "lesion, kept"], ["lost", "lesion, lost"]);
    if (view.kept && !show.scores) keys.push(["kept", "kept"], ["dropped", "dropped"]);
    if (view.kept && show.scores) keys.push(["", "darker = dropped"]);
    if (this.shownKeys === JSON.stringify(keys)) return;
    this.shownKeys = JSON.stringify(keys);
    this.legend.replaceChildren(
      ...keys.map(([kind, text]) => {
        const item = element("span");
        if (kind && kind !== "merged") item.append(element("i", `key ${kind}`));
        item.append(text);
        return item;
      }),
    );
  }
}
