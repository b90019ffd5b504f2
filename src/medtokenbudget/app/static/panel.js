// One selector's card: choice, picture, numbers, bars. Its own file because a page has one or two of them, all alike.

import { paint } from "./draw.js";
import { about, percent, sentence } from "./view.js";

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export class Panel {
  /** side: "a" or "b"; onChoose(name) when another selector is chosen. */
  constructor(side, onChoose) {
    const root = document.getElementById("panel-template").content.firstElementChild.cloneNode(true);
    this.side = side;
    this.root = root;
    root.dataset.side = side;
    this.select = root.querySelector("select");
    this.select.id = `selector-${side}`;
    const label = root.querySelector(".choose label");
    label.htmlFor = this.select.id;
    label.textContent = side === "a" ? "Selector" : "Second selector";
    root.setAttribute("aria-label", side === "a" ? "Selector" : "Second selector");
    this.canvas = root.querySelector("canvas");
    this.legend = root.querySelector(".legend");
    this.stats = root.querySelector(".stats");
    this.bars = root.querySelector(".bars tbody");
    this.about = root.querySelector(".about");
    this.select.addEventListener("change", () => onChoose(this.select.value));
  }

  /** The selectors of an answer to choose from; variants in a group of their own. */
  offer(names, chosen) {
    const plain = names.filter((name) => !name.includes(":"));
    const variants = names.filter((name) => name.includes(":"));
    const options = (list) => list.map((name) => new Option(name, name, false, name === chosen));
    this.select.replaceChildren(...options(plain));
    if (variants.length) {
      const group = document.createElement("optgroup");
      group.label = "Variants";
      group.append(...options(variants));
      this.select.append(group);
    }
    this.about.textContent = about(chosen);
  }

  classes(names, truth) {
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

  render(name, scene, view, show) {
    this.paint(name, scene, view, show);
    view.probabilities.forEach((p, i) => {
      const { row, fill, value } = this.rows[i];
      fill.style.width = `${100 * p}%`;
      value.textContent = percent(p);
      row.classList.toggle("top1", i === view.top);
    });
    this.numbers(view);
    this.keys(scene, view, show);
  }

  paint(name, scene, view, show) {
    const { canvas } = this;
    const ratio = scene.picture.naturalHeight / scene.picture.naturalWidth;
    const width = Math.max(1, Math.round(canvas.clientWidth * Math.min(2, window.devicePixelRatio || 1)));
    const height = Math.max(1, Math.round(width * ratio));
    if (canvas.width !== width || canvas.height !== height) {
      canvas.width = width;
      canvas.height = height;
    }
    paint(canvas.getContext("2d"), width, height, scene, view, show);
    canvas.setAttribute("aria-label", `The picture with the patches that stay. ${sentence(name, view)}`);
  }

  numbers(view) {
    const rows = [[view.kept ? "Kept" : "Tokens", `${view.k}`, `of ${view.n}`]];
    if (view.retention !== null) {
      rows.push(["Retention", percent(view.retention), `${view.lesion - view.lost} of ${view.lesion}`]);
      rows.push(["Ceiling", percent(view.ceiling), ""]);
      rows.push(["Of the ceiling", percent(view.ofCeiling), ""]);
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
    if (view.groups) keys.push(["merged", "one colour, one token: patches merged, lines between tokens"]);
    if (show.scores) keys.push(["ramp", "score, low to high"]);
    if (view.kept && show.lesion && scene.lesion) keys.push(["lesion", "lesion kept"], ["lost", "lesion lost"]);
    if (view.kept && !show.scores) keys.push(["kept", "kept"], ["dropped", "dropped"]);
    if (view.kept && show.scores) keys.push(["", "darker: dropped"]);
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
